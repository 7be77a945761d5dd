"""Sharding of what is not attention over TP, where sizes divide by it: MLPs, experts, lm_head."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from cplayers.attention.linear import GatheredLinear, RowParallelLinear, adopt, is_plain
from cplayers.hf.experts import expert_width, shard_experts, unknown_layout
from cplayers.hf.families import Family
from cplayers.mesh import CPMesh

FilterFn = Callable[[nn.Module, str], bool]


class Dense(NamedTuple):
    """What happened to one module.

    Attributes:
        name: Its fully qualified name.
        sharded: Whether it was split over TP; otherwise it is replicated.
        reason: Why not.
    """

    name: str
    sharded: bool
    reason: str = ""


def shard_dense(
    model: Any, family: Family, mesh: CPMesh, filter_fn: FilterFn | None
) -> list[Dense]:
    """Split all MLPs, experts and the lm_head that TP divides; leave the others whole and say so.

    Args:
        model: The causal LM, changed in place.
        family: Its family.
        mesh: The ranks.
        filter_fn: ``filter_fn(module, name)`` is False for what is to stay replicated.

    Returns:
        What happened, by module; nothing for tp=1.
    """
    if mesh.size("tp") == 1:
        return []
    result = []
    shard: Callable[[Any, CPMesh], None]
    for name, module in model.named_modules():
        if type(module).__name__ == family.mlp and hasattr(module, "gate_proj"):
            parts = module.gate_proj, module.up_proj, module.down_proj
            known = "" if all(map(is_plain, parts)) else "its projections are not plain nn.Linear"
            width, shard = module.gate_proj.out_features, _shard_mlp
        elif name.rpartition(".")[2] == "experts":
            known = unknown_layout(module, family.experts)
            width, shard = 0 if known else expert_width(module), shard_experts
        else:
            continue
        reason = known or _why_not(name, module, width, "intermediate size", mesh, filter_fn)
        if not reason:
            shard(module, mesh)
        result.append(Dense(name, not reason, reason))
    head = model.lm_head
    reason = _why_not("lm_head", head, head.out_features, "vocabulary size", mesh, filter_fn)
    if not is_plain(head):
        reason = "it is not a plain nn.Linear"
    if not reason:
        _shard_head(model, mesh)
    return [*result, Dense("lm_head", not reason, reason)]


def _why_not(
    name: str, module: nn.Module, width: int, what: str, mesh: CPMesh, filter_fn: FilterFn | None
) -> str:
    tp = mesh.size("tp")
    if filter_fn is not None and not filter_fn(module, name):
        return "left out by filter_fn"
    return f"{what} {width} is not divisible by tp={tp}" if width % tp else ""


def _own(width: int, mesh: CPMesh) -> tuple[int, int]:
    """This rank's range of ``width`` features."""
    part = width // mesh.size("tp")
    return mesh.rank("tp") * part, (mesh.rank("tp") + 1) * part


def _shard_mlp(mlp: Any, mesh: CPMesh) -> None:
    down = mlp.down_proj
    own = _own(down.in_features, mesh)
    for linear in (mlp.gate_proj, mlp.up_proj):
        adopt(linear, linear, dim=0, rows=own)
        linear.out_features = own[1] - own[0]
    with torch.device("meta"):
        mlp.down_proj = RowParallelLinear(
            own[1] - own[0], down.out_features, bias=down.bias is not None, mesh=mesh
        )
    adopt(mlp.down_proj, down, dim=1, rows=own)


def _shard_head(model: Any, mesh: CPMesh) -> None:
    head = model.lm_head
    if head.weight is model.get_input_embeddings().weight:
        # the embedding stays whole, so the tie is cut: same storage until the shard is cloned
        head.weight = nn.Parameter(head.weight.detach(), requires_grad=head.weight.requires_grad)
    own = _own(head.out_features, mesh)
    with torch.device("meta"):
        model.lm_head = GatheredLinear(
            head.in_features, own[1] - own[0], bias=head.bias is not None, mesh=mesh
        )
    adopt(model.lm_head.part, head, dim=0, rows=own)
