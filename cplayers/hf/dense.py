"""Sharding of what is not attention: MLPs and lm_head over TP, with torch's tensor-parallel API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

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
    """Split every MLP and the lm_head that TP divides; leave the others replicated and say so."""
    tp = mesh.size("tp")
    if tp == 1:
        return []
    mlps = [(n, m) for n, m in model.named_modules() if type(m).__name__ == family.mlp]
    result = []
    for name, module in mlps:
        width = module.gate_proj.out_features
        plan: dict[str, ParallelStyle] = {
            "gate_proj": ColwiseParallel(),
            "up_proj": ColwiseParallel(),
            "down_proj": RowwiseParallel(),
        }
        result.append(_shard(name, module, width, "intermediate size", plan, mesh, filter_fn))
    head = model.lm_head
    if head.weight is model.get_input_embeddings().weight:
        # the embedding stays whole on every rank, so the tie is cut (the storage is still shared
        # until the shard is made)
        head.weight = nn.Parameter(head.weight.detach(), requires_grad=head.weight.requires_grad)
    style = ColwiseParallel(output_layouts=Replicate())
    result.append(
        _shard("lm_head", head, head.out_features, "vocabulary size", style, mesh, filter_fn)
    )
    return result


def _shard(
    name: str,
    module: nn.Module,
    width: int,
    what: str,
    plan: ParallelStyle | dict[str, ParallelStyle],
    mesh: CPMesh,
    filter_fn: FilterFn | None,
) -> Dense:
    tp = mesh.size("tp")
    if filter_fn is not None and not filter_fn(module, name):
        return Dense(name, False, "left out by filter_fn")
    if width % tp:
        return Dense(name, False, f"{what} {width} is not divisible by tp={tp}")
    # src_data_rank=None: every rank cuts its own copy, nothing is sent
    parallelize_module(module, mesh.tp_mesh(), plan, src_data_rank=None)
    return Dense(name, True)
