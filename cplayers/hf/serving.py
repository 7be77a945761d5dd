"""A parallelized model as `cplayers.serving` wants it: one step over packed tokens of any requests.

Example, with replicas of one rank::

    model = parallelize(model, CPMesh(Topology()))
    server = Server(ServedModel(model, serving_step(model)), ServingConfig(...), num_replicas=4)
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from cplayers.attention import gather_rows, take_rows
from cplayers.cache import PagedKVCache, StepPlan
from cplayers.hf.model import MASKS_BY_TYPE, NO_MASK, ContextParallelModel
from cplayers.mesh import CPMesh


def serving_step(
    model: ContextParallelModel,
) -> Callable[[Tensor, StepPlan, PagedKVCache, CPMesh], Tensor]:
    """The function ``step(tokens, plan, cache, mesh)`` that a `ServedModel` takes.

    It returns the logits `[R, vocab]` of the last new token of each request that has one. Requests
    come without padding, so that a token's position in its sequence is its rotary position.

    Args:
        model: What `parallelize` returned, on a mesh with the tensor parallelism of one replica.
    """

    def step(tokens: Tensor, plan: StepPlan, cache: PagedKVCache, mesh: CPMesh) -> Tensor:
        output = model.get_decoder()(  # type: ignore[attr-defined]  # the mixin's other base
            input_ids=take_rows(tokens, plan)[None],
            position_ids=plan.positions[None],
            attention_mask=MASKS_BY_TYPE if model.cp.family.windows == "layer" else NO_MASK,
            use_cache=False,
            cp_cache=cache,
            cp_plan=plan,
        )
        last = gather_rows(output.last_hidden_state[0], plan, mesh, plan.last)
        return model._cp_logits(last, None, len(last))[:, 0]

    return step
