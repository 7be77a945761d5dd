"""Backend ``"native"``: few query rows over many keys on a CPU, by a kernel in C.

It needs a C compiler, as torch.compile and Triton do; without one the backend refuses, with what the
compiler said, and ``"auto"`` takes torch's operators (`cplayers.ops.backends.cpu`).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from cplayers.ops import native
from cplayers.ops.backends.base import Backend, PagedKeys
from cplayers.ops.backends.tiled import device_refusal
from cplayers.ops.partial import Partial
from cplayers.ops.spans import Tile

MAX_ROWS = 16
"""Rows per KV head (query heads of its group, times new tokens) up to which it pays."""


def pays(most_rows: int, num_heads: int, num_kv_heads: int) -> bool:
    """Whether it is the fastest for requests of up to so many rows; see `Backend.pays`."""
    return most_rows * num_heads <= MAX_ROWS * num_kv_heads


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lo: Tensor,
    hi: Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    tiles: Sequence[Tile] | None = None,
) -> Partial:
    k, v = k.transpose(0, 1), v.transpose(0, 1)
    return native.span_attention(q, k, v, lo.long(), hi.long(), scale=scale)


def _run_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    keys: PagedKeys,
    *,
    scale: float,
    softcap: float | None = None,
) -> Partial:
    return native.span_attention(
        q,
        k_cache,
        v_cache,
        keys.lo,
        keys.hi,
        scale=scale,
        block_table=keys.block_table,
        block_size=keys.block_size,
        request=keys.request,
    )


def _refuse(q: Tensor, k: Tensor, v: Tensor, softcap: float | None) -> str | None:
    refused = device_refusal(q)
    if refused is not None:
        return refused
    if softcap is not None:
        return f"it has no softcap, {softcap} was asked for"
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return "it needs q, k and v contiguous in their last dimension"
    return native.unavailable(q.shape[-1], v.shape[-1], q.dtype)


NATIVE = Backend("native", _run, _refuse, _run_paged, pays)
