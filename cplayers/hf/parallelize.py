"""`parallelize`: swap context-parallel attention into a transformers model, in place."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from transformers import PreTrainedModel

from cplayers.attention import Combine, PCPPrefillAttention
from cplayers.attention.gqa import QProj
from cplayers.cache import CacheConfig
from cplayers.errors import ConfigError
from cplayers.hf.attention import HFGQAAttention
from cplayers.hf.dense import FilterFn, shard_dense
from cplayers.hf.families import attention_modules, family_of, refuse_length_dependent_rope
from cplayers.hf.model import ContextParallelModel
from cplayers.hf.state import CPState
from cplayers.mesh import CPMesh, validate

Model = TypeVar("Model", bound=PreTrainedModel)


def parallelize(
    model: Model,
    mesh: CPMesh,
    *,
    cache: CacheConfig | None = None,
    q_proj: QProj = "gather",
    combine: Combine = "a2a",
    prefill: str = "auto",
    backend: str = "auto",
    filter_fn: FilterFn | None = None,
) -> Model:
    """Make ``model`` run context-parallel on ``mesh``; it is then called alike on all ranks.

    The attention modules are replaced, their Parameters kept and cut to this rank. MLPs and lm_head
    are sharded over TP where it divides them. With PCP above 1 each rank computes its zigzag share
    of a prompt through the whole network.

    Example:
        >>> mesh = CPMesh(Topology(pcp=2, dcp=2))             # under torchrun, 2 ranks
        >>> model = parallelize(AutoModelForCausalLM.from_pretrained(path), mesh)
        >>> model.generate(**tokenizer(prompt, return_tensors="pt"), max_new_tokens=64)
        >>> print(model.cp.report())

    Args:
        model: A causal LM of a known architecture, whole, on every rank. Changed in place.
        mesh: The ranks.
        cache: Cache settings; by default blocks and interleave of 16 tokens, growing as needed.
        q_proj: ``"gather"`` or ``"tpa"``, see `DCPGQAAttention`.
        combine: ``"a2a"``, ``"ag_rs"`` or ``"ar"``, see `cplayers.attention.combine`.
        prefill: Strategy of `PCPPrefillAttention`.
        backend: Local attention, see `cplayers.ops.attend`.
        filter_fn: ``filter_fn(module, name)`` is False for MLPs (or lm_head) to leave replicated.

    Returns:
        The same object, now also a `ContextParallelModel`; ``model.cp`` tells what happened.

    Raises:
        ConfigError: If the architecture is unknown or does not fit the mesh, on all ranks alike
            and before anything is changed.
    """
    if isinstance(model, ContextParallelModel):
        raise ConfigError(
            "a model that is parallelized already", "weights are cut once", "load the model again"
        )
    family = family_of(model)
    cache = cache or CacheConfig()
    config: Any = model.config
    validate(
        mesh.topology,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        block_size=cache.block_size,
        interleave_size=cache.interleave_size,
        replicate_q=q_proj == "tpa",
    )
    refuse_length_dependent_rope(config, mesh)
    layers: list[Any] = []
    for name, module in attention_modules(model, family):
        layer = HFGQAAttention.from_hf(
            module,
            mesh,
            q_proj=q_proj,
            combine=combine,
            prefill=PCPPrefillAttention(prefill, backend=backend, mesh=mesh),
            backend=backend,
        )
        model.set_submodule(name, layer)
        layers.append(layer)
    dense = shard_dense(model, family, mesh, filter_fn)
    base = type(model)
    model.__class__ = type(f"ContextParallel{base.__name__}", (ContextParallelModel, base), {})
    cast("Any", model).cp = CPState(mesh, cache, layers, dense)
    return model
