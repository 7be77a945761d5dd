"""The kernels' functions in plain torch, for any device: what each of them has to equal.

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

    Args:
        slot_mapping: Slot of each row, int `[T]`; rows whose slot is no slot are skipped.
        planes: Rows of each plane, `[T, heads, dim]`.
        stores: Their caches, `[heads, slots, dim]`.
    """
    for rows, store in zip(planes, stores, strict=True):
        kept = ((slot_mapping >= 0) & (slot_mapping < store.shape[1])).nonzero().squeeze(1)
        source = rows[kept].transpose(0, 1).to(store.dtype)
        store.index_copy_(1, slot_mapping[kept].long(), source)


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
    """out and lse side by side; see `cplayers.ops.kernels.pack`.

    Args:
        partial: out `[T, N, V]`, lse `[T, N]`.
        parts: Into how many equal parts the heads are cut; above 1 the parts come first.
    """
    carrier = partial.out.dtype if partial.out.dtype.itemsize <= 4 else torch.float32
    lse = partial.lse.contiguous().unsqueeze(-1)
    packed = torch.cat([partial.out.contiguous().view(carrier), lse.view(carrier)], dim=-1)
    if parts == 1:
        return packed
    return rearrange(packed, "t (k n) w -> k t n w", k=parts).contiguous()


def unpack(packed: Tensor, dtype: torch.dtype) -> Partial:
    """The inverse of `pack`, for any leading shape; see `cplayers.ops.kernels.unpack`.

    Args:
        packed: `[..., W]`.
        dtype: Of the out that was packed.
    """
    width = 4 // packed.dtype.itemsize
    # clones, since a view as another type needs an offset that is a multiple of its size
    out, lse = (
        part.clone(memory_format=torch.contiguous_format)
        for part in (packed[..., :-width], packed[..., -width:])
    )
    return Partial(out.view(dtype), lse.view(torch.float32).squeeze(-1))


def merge_packed(packed: Tensor, dtype: torch.dtype) -> Partial:
    """`unpack`, then `merge_partials`; see `cplayers.ops.kernels.merge_packed`.

    Args:
        packed: `[n, T, N, W]`.
        dtype: Of the out that was packed, and of the result.
    """
    out, lse = unpack(packed, dtype)
    return merge_partials(out, lse)
