"""Sharding of a mixture's routed experts over TP: every rank holds a slice of every expert.

Legend: E experts, I intermediate size of an expert, h model width.

    gate_up_proj [E, 2*I, h]: the own rows of the gate half and the same ones of the up half
    down_proj    [E, h, I]:   the own columns
    y = sum over TP of experts(x)                                    # one all-reduce

A rank runs transformers' own code over smaller matrices, in whichever implementation is set
(``config._experts_implementation``), routed as the plain model routes: routers stay whole. As
grouped_mm wants rows of a multiple of 16 bytes, a slice is padded to a multiple of 8 features with
weights of 0, which adds nothing.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from cplayers.mesh import CPMesh

_KNOWN_LAYOUT = {
    "has_gate": True,
    "has_bias": False,
    "has_post_expert_norm": False,
    "is_transposed": False,
    "is_concatenated": True,
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
    if any(getattr(experts, name, None) is not wanted for name, wanted in _KNOWN_LAYOUT.items()):
        return "its weights are laid out in another way than gate over up, without biases"
    names = {name for name, _ in experts.named_parameters()}
    if names != {"gate_up_proj", "down_proj"}:
        return f"it has the Parameters {', '.join(sorted(names))}"
    (count, gate_up, hidden), down = experts.gate_up_proj.shape, tuple(experts.down_proj.shape)
    if gate_up % 2 or down != (count, hidden, gate_up // 2):
        return f"gate_up_proj and down_proj of shapes {count, gate_up, hidden} and {down}"
    return ""


def shard_experts(experts: Any, mesh: CPMesh) -> None:
    """Cut the experts, in place, to this rank's slice of the intermediate size.

    The Parameter objects stay the same; the memory of the rest is released.

    Args:
        experts: A module without an `unknown_layout`, whose I is a multiple of tp.
        mesh: The ranks.
    """
    part = experts.down_proj.shape[-1] // mesh.size("tp")
    start, extra = mesh.rank("tp") * part, -part % _MULTIPLE
    gate_up, down = experts.gate_up_proj, experts.down_proj
    halves = gate_up.data.unflatten(1, (2, -1)).narrow(2, start, part)
    gate_up.data = functional.pad(halves, (0, 0, 0, extra)).flatten(1, 2)  # pad copies
    down.data = functional.pad(down.data.narrow(2, start, part), (0, extra))
    experts.intermediate_dim = part + extra
    experts.cp_mesh = mesh
    base = type(experts)
    experts.__class__ = type(f"Sharded{base.__name__}", (ShardedExperts, base), {})
