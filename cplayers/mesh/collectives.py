"""Collectives on a torch process group: rows in, new rows out, for every dtype and stride.

Rows come and go in the order of the group's torch ranks. A ``Wait`` is what turns a launched
operation into a finished one; it is passed in, because waiting is where failures are noticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from cplayers.mesh.lent import lend

Wait = Callable[["dist.Work"], None]
Order = Callable[[Tensor], Tensor] | None

# torch 2.13 renamed these two and deprecates the old names. Chosen once, by feature.
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# What both gloo and NCCL carry and add up. Anything else travels as bytes, or is added up wider.
_NATIVE = frozenset(
    {torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32}
)
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


class Hop:
    """A tensor on its way; see `CPMesh.shift`, `CPMesh.start_all_gather` and its like.

    Args:
        received: Where it arrives.
        work: The operation, or ``None`` where nothing travels.
        wait: How the operation is finished.
        sent: What was sent, which must live until then.
        order: What is done to it on arrival, or ``None``.
    """

    def __init__(
        self,
        received: Tensor,
        work: dist.Work | None = None,
        wait: Wait | None = None,
        sent: Tensor | None = None,
        order: Order = None,
    ) -> None:
        self._received, self._work, self._wait, self._sent = received, work, wait, sent
        self._order = order

    def wait(self) -> Tensor:
        """What arrived; further calls return it again.

        Raises:
            RankFailedError: A member failed.
        """
        if self._work is not None and self._wait is not None:
            self._wait(self._work)
        if self._order is not None:
            self._received = self._order(self._received)
        self._work = self._sent = self._order = None
        return self._received


def all_gather(x: Tensor, group: dist.ProcessGroup, wait: Wait, order: Order) -> Hop:
    """Launch a gather of every member's x, stacked: ``[n, *x.shape]``."""
    n = group.size()
    sent = _flat_for_wire(x)
    received = sent.new_empty(n * sent.numel())
    lend(received, sent)
    work = cast("dist.Work", _all_gather_flat(received, sent, group=group, async_op=True))
    return Hop(received.view(x.dtype).view(n, *x.shape), work, wait, sent, order)


def all_to_all(x: Tensor, group: dist.ProcessGroup, wait: Wait, order: Order = None) -> Hop:
    """Launch row i of x ``[n, ...]`` to member i; row i of the result came from member i."""
    sent = _flat_for_wire(x)
    received = torch.empty_like(sent)
    lend(received, sent)
    work = cast("dist.Work", dist.all_to_all_single(received, sent, group=group, async_op=True))
    return Hop(received.view(x.dtype).view(x.shape), work, wait, sent, order)


def reduce_scatter(x: Tensor, group: dist.ProcessGroup, wait: Wait) -> Tensor:
    """Sum over members of row r of x ``[n, ...]`` on member r.

    On CPU the rows travel by all-to-all and are added up here, in float32 for narrower floats:
    gloo's own reduce-scatter is an all-reduce of everything, of which most is then dropped.
    """
    if x.device.type == "cpu":
        rows = all_to_all(x, group, wait).wait()
        return rows.sum(0, dtype=_sum_dtype(x.dtype)).to(x.dtype)
    return reduce_scatter_by_backend(x, group, wait)


def reduce_scatter_by_backend(x: Tensor, group: dist.ProcessGroup, wait: Wait) -> Tensor:
    """The same with the backend's own operation, which adds up in x's dtype where it can."""
    sent = x.detach().to(_wire_dtype(x.dtype)).contiguous().view(-1)
    received = sent.new_empty(sent.numel() // group.size())
    wait(cast("dist.Work", _reduce_scatter_flat(received, sent, group=group, async_op=True)))
    return received.to(x.dtype).view(x.shape[1:])


def shift(x: Tensor, group: dist.ProcessGroup, wait: Wait, target: int, source: int) -> Hop:
    """Launch x to member ``target`` and the same from ``source``, torch ranks of the group.

    As an all-to-all with one row: waiting for it finds failures like any other, and it runs in the
    background on both backends.
    """
    sent = _flat_for_wire(x)
    received = torch.empty_like(sent)
    to, from_ = ([sent.numel() * (i == at) for i in range(group.size())] for at in (target, source))
    lend(received, sent)
    work = dist.all_to_all_single(received, sent, from_, to, group=group, async_op=True)
    return Hop(received.view(x.dtype).view(x.shape), cast("dist.Work", work), wait, sent)


def all_reduce(x: Tensor, group: dist.ProcessGroup, wait: Wait, operation: str) -> Tensor:
    """Sum or maximum of every member's x, in x's dtype where the backend can."""
    total = x.detach().to(_wire_dtype(x.dtype), copy=True, memory_format=torch.contiguous_format)
    added = total.view(-1)  # lent in place of total, which is returned
    lend(added)
    op = _OPERATIONS[operation]
    wait(cast("dist.Work", dist.all_reduce(added, op=op, group=group, async_op=True)))
    return total.to(x.dtype)


def _flat_for_wire(x: Tensor) -> Tensor:
    flat = x.detach().contiguous().view(-1)
    return flat if x.dtype in _NATIVE else flat.view(torch.uint8)


def _wire_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a backend can add up ``dtype``."""
    if dtype in _NATIVE:
        return dtype
    return torch.float32 if dtype.is_floating_point else torch.int64


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which rows of ``dtype`` are added up here."""
    if dtype.is_floating_point:
        return torch.float64 if dtype == torch.float64 else torch.float32
    return torch.int64
