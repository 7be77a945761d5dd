"""The functions of `cplayers.ops.kernels` in plain torch, for any device: what they have to equal.

The kernels take fp32, bf16 and fp16; these take fp64 as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from einops import rearrange
from torch import Tensor

from cplayers.ops.backends.math import MATH
from cplayers.ops.partial import Partial, empty, merge_stacked


def span_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lo: Tensor,
    hi: Tensor,
    *,
    scale: float,
    block_table: Tensor | None = None,
    block_size: int | None = None,
    request: Tensor | None = None,
    softcap: float | None = None,
) -> Partial:
    """Attend to keys in blocks; see `cplayers.ops.kernels.span_attention`.

    The keys of a request are copied out of the cache.

    Args:
        q: `[T, N, H]`.
        k_cache: `[K, slots, H]`.
        v_cache: `[K, slots, V]`.
        lo: First key of each row, counted in its request, int `[T]`.
        hi: One past the last key of each row, int `[T]`.
        scale: Factor of q . k.
        block_table: Block ids of each request, int `[R, B]`; ``None``: slots are keys.
        block_size: Slots per block.
        request: Request of each row, int `[T]`; ``None``: all rows are of request 0.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
    """
    result = empty(len(q), q.shape[1], v_cache.shape[2], q.dtype, q.device)
    if block_table is None or block_size is None:
        rows_of = [(None, torch.arange(len(q), device=q.device))]
    else:
        number = torch.zeros_like(lo) if request is None else request
        rows_of = [(ids, (number == r).nonzero().squeeze(1)) for r, ids in enumerate(block_table)]
    for ids, rows in rows_of:
        seen = rows[hi[rows] > lo[rows]]
        if not len(seen):
            continue
        length = int(hi[seen].max())
        keys = torch.arange(length, device=q.device)
        if ids is not None and block_size is not None:
            keys = ids.long()[keys // block_size] * block_size + keys % block_size
        k, v = (cache[:, keys].transpose(0, 1) for cache in (k_cache, v_cache))
        out, lse = MATH.run(q[seen], k, v, lo[seen], hi[seen], scale=scale, softcap=softcap)
        result.out[seen], result.lse[seen] = out, lse
    return result


def cache_write(slot_mapping: Tensor, planes: Sequence[Tensor], stores: Sequence[Tensor]) -> None:
    """Write rows to their slots; see `cplayers.ops.kernels.cache_write`.

    No shape depends on a value, so that torch.compile takes it whole: a row that is skipped repeats
    the first one that is not, and if there is none, puts back what a slot holds.

    Args:
        slot_mapping: Slot of each row, int `[T]`; rows whose slot is no slot are skipped.
        planes: Rows of each plane, `[T, heads, dim]`.
        stores: Their caches, `[heads, slots, dim]`.
    """
    if not len(slot_mapping):
        return
    slots = slot_mapping.long()
    goes = (slots >= 0) & (slots < stores[0].shape[1])
    first = goes.int().argmax(0, keepdim=True)
    spare = torch.where(goes.any(), slots.index_select(0, first), 0)
    target = torch.where(goes, slots, spare)
    for rows, store in zip(planes, stores, strict=True):
        source = rows.transpose(0, 1).to(store.dtype)
        again = source.index_select(1, first)
        again = torch.where(goes.any(), again, store.index_select(1, spare))
        store.index_copy_(1, target, torch.where(goes[:, None], source, again))


def merge_partials(out: Tensor, lse: Tensor, *, dtype: torch.dtype | None = None) -> Partial:
    """Merge stacked partials; see `cplayers.ops.kernels.merge_partials`.

    Args:
        out: `[n, T, N, V]`.
        lse: `[n, T, N]`.
        dtype: Of the result; ``None``: that of ``out``.
    """
    wide = out if out.dtype == torch.float64 else out.float()
    merged = merge_stacked(wide, lse)
    return Partial(merged.out.to(dtype or out.dtype), merged.lse)


def pack(partial: Partial, *, parts: int = 1) -> Tensor:
    """out and lse side by side, lse in 4 bytes; see `cplayers.ops.kernels.pack`.

    Args:
        partial: out `[T, N, V]`, lse `[T, N]`.
        parts: Into how many equal parts the heads are cut; above 1 the parts come first.
    """
    carrier = partial.out.dtype if partial.out.dtype.itemsize <= 4 else torch.float32
    out, lse = partial.out.contiguous().view(carrier), partial.lse.contiguous().unsqueeze(-1)
    lse = lse.view(carrier)
    if parts > 1:
        out, lse = (rearrange(t, "t (k n) w -> k t n w", k=parts) for t in (out, lse))
    return torch.cat([out, lse], dim=-1)


def unpack(packed: Tensor, dtype: torch.dtype) -> Partial:
    """The inverse of `pack`, for any leading shape; see `cplayers.ops.kernels.unpack`.

    Args:
        packed: `[..., W]`.
        dtype: Of the out that was packed.

    Returns:
        out `[..., V]`, a view of ``packed`` where the types allow it, and lse `[...]`.
    """
    width = 4 // packed.dtype.itemsize
    out, lse = packed[..., :-width], packed[..., -width:]
    if packed.dtype != dtype:
        out = _own_memory(out).view(dtype)
    return Partial(out, _own_memory(lse).view(torch.float32).squeeze(-1))


def merge_packed(packed: Tensor, dtype: torch.dtype) -> Partial:
    """`unpack`, then merge; see `cplayers.ops.kernels.merge_packed`.

    Args:
        packed: `[n, T, N, W]`.
        dtype: Of the out that was packed, and of the result.
    """
    return merge_stacked(*unpack(packed, dtype))


def _own_memory(x: Tensor) -> Tensor:
    """A copy from offset 0 on: ``contiguous`` keeps a single row where it is, at any offset."""
    return x.clone(memory_format=torch.contiguous_format)
