"""Sharding of a mixture's routed experts over TP: every rank holds a slice of every expert.

Legend: E experts, I intermediate size of an expert, h model width.

    gate over up:                 gate_up_proj [E, 2*I, h], down_proj [E, h, I]
    gate and up by turns, gpt-oss: gate_up_proj [E, h, 2*I], down_proj [E, I, h], with biases
    a rank's slice:               the own part of I in all of them
    y = sum over TP of experts(x)                                    # one all-reduce

A rank runs transformers' own code over smaller matrices, in whichever implementation is set
(``config._experts_implementation``), routed as the plain model routes: routers stay whole. As
grouped_mm wants rows of a multiple of 16 bytes, a slice is padded to a multiple of 8 features with
weights of 0, which adds nothing. The bias of down_proj is added by the first rank alone.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from cplayers.mesh import CPMesh

_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "has_post_expert_norm")
_KNOWN_LAYOUTS: dict[tuple[bool | None, ...], tuple[str, ...]] = {
    (True, False, False, True, False): ("gate_up_proj", "down_proj"),
    (True, True, True, False, False): (
        "gate_up_proj",
        "gate_up_proj_bias",
        "down_proj",
        "down_proj_bias",
    ),
}
_MULTIPLE = 8  # features; 16 bytes in bf16


class ShardedExperts:
    """Mixin in front of an experts class of transformers; `shard_experts` makes a module both."""

    cp_mesh: CPMesh

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the plain module's, `[T, h]`, the same on all of TP."""
        return self.cp_mesh.all_reduce(super().forward(*args, **kwargs), "tp")  # type: ignore[misc]


def unknown_layout(experts: Any, known: str) -> str:
    """Why the weights of ``experts`` cannot be cut, or an empty string.

    Args:
        experts: A module.
        known: The class of the family's experts.
    """
    if type(experts).__name__ != known:
        return f"{type(experts).__name__} is not the known class {known}"
    names = _KNOWN_LAYOUTS.get(tuple(getattr(experts, flag, None) for flag in _FLAGS))
    if names is None:
        return "its weights are laid out in another way than gate over up, or as those of gpt-oss"
    found = {name for name, _ in experts.named_parameters()}
    if found != set(names):
        return f"it has the Parameters {', '.join(sorted(found))}"
    gate_up, down = experts.gate_up_proj.shape, experts.down_proj.shape
    (count, wide, hidden), (also, out, narrow) = gate_up, down
    if experts.is_transposed:
        wide, hidden, out, narrow = hidden, wide, narrow, out
    if wide % 2 or (also, out, narrow) != (count, hidden, wide // 2):
        return f"gate_up_proj and down_proj of shapes {tuple(gate_up)} and {tuple(down)}"
    return ""


def expert_width(experts: Any) -> int:
    """I, of experts without an `unknown_layout`."""
    return int(experts.down_proj.shape[1 if experts.is_transposed else 2])


def shard_experts(experts: Any, mesh: CPMesh) -> None:
    """Cut the experts, in place, to this rank's slice of the intermediate size.

    The Parameter objects stay the same; the memory of the rest is released.

    Args:
        experts: A module without an `unknown_layout`, whose I is a multiple of tp.
        mesh: The ranks.
    """
    part = expert_width(experts) // mesh.size("tp")
    start, extra = mesh.rank("tp") * part, -part % _MULTIPLE
    gate_up, down = experts.gate_up_proj, experts.down_proj
    # padding copies, so that the rest is released
    if experts.is_transposed:
        for p in (gate_up, experts.gate_up_proj_bias):
            p.data = functional.pad(p.data.narrow(-1, 2 * start, 2 * part), (0, 2 * extra))
        down.data = functional.pad(down.data.narrow(1, start, part), (0, 0, 0, extra))
        if mesh.rank("tp"):
            experts.down_proj_bias.data.zero_()
        experts.intermediate_size = part + extra
    else:
        halves = gate_up.data.unflatten(1, (2, -1)).narrow(2, start, part)
        gate_up.data = functional.pad(halves, (0, 0, 0, extra)).flatten(1, 2)
        down.data = functional.pad(down.data.narrow(2, start, part), (0, extra))
        experts.intermediate_dim = part + extra
    experts.cp_mesh = mesh
    base = type(experts)
    experts.__class__ = type(f"Sharded{base.__name__}", (ShardedExperts, base), {})
