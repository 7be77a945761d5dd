"""Attention of packed query rows to keys that are where the paged cache has them.

===========  ===================  ==========================================================
q            `[T, N, H]`          rows of all requests, in any order
k_cache      `[K, slots, H]`      head-major, as the paged cache stores it
v_cache      `[K, slots, V]`      may be the first V columns of k_cache, which is then read once
block_table  `[R, B]`             block ids of each request; key s is in block ``s // Z``
request      `[T]`                which row of the table each query row reads
lo, hi       `[T]`                row t sees the keys ``lo[t] .. hi[t] - 1`` of its request
===========  ===================  ==========================================================

One program has some query rows of one KV head (`tiles`) and one of several splits of the keys::

    groups of rows: those of one request, if all of them have a key in common, else each token's
    for each group:
        for block_n keys of this split, from the lowest lo to the highest hi of the group:
            look up their slots; load k and v, keys of others replaced by 0
            scores = q k^T, those outside a row's own span -inf
            online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867), all sums in fp32
    write out and lse, or this split's partial of them

Splits are merged by `merge_partials` (flash-decoding). A group has no gaps, so that every key that
is loaded is seen by some row: what lies in unwritten slots, NaN included, is never read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cplayers.ops.device import DTYPES
from cplayers.ops.kernels.launch import Launch, interpreted, processors, require
from cplayers.ops.kernels.merge import merge_partials
from cplayers.ops.kernels.span_kernel import span_kernel
from cplayers.ops.kernels.tiles import TileShape, ceil_div, split_count, tile_shape
from cplayers.ops.partial import Partial, empty


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
    rows_per_request: int | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
    tile_rows: int | None = None,
) -> Partial:
    """Attend with each query row to its own run of keys of its request.

    Nothing is checked by value, since that would wait for the device: rows of ``request``, block
    ids and slots that do not exist are read from wherever they point.

    Args:
        q: `[T, N, H]`; query head n reads KV head n // (N/K).
        k_cache: `[K, slots, H]`, any strides of heads and slots.
        v_cache: `[K, slots, V]`; a view of the first columns of ``k_cache`` is not read again.
        lo: First key that each row sees, counted in its request, int `[T]`. Windows come in here.
        hi: One past the last key that each row sees, int `[T]`; hi <= lo: it sees nothing.
        scale: Factor of q . k.
        block_table: Block ids of each request, int `[R, B]`; ``None``: slots are keys, of all rows.
        block_size: Slots per block, any number; needed with a table.
        request: Row of the table that each row reads, int `[T]`; ``None``: all read the first.
        rows_per_request: Rows that requests usually have, for which tiles are made; ``None``: as if
            every row of the table had as many.
        softcap: Logits become ``softcap * tanh(logits / softcap)``.
        num_splits: Parts of the keys that are worked on side by side and merged; ``None``: chosen
            from the shapes and the device.
        tile_rows: Most rows of a program, 16 or 32; ``None``: chosen.

    Returns:
        out `[T, N, V]` in q's dtype and lse `[T, N]` in fp32, natural log; (0, -inf) for a row that
        sees nothing.

    Raises:
        ConfigError: Shapes or dtypes do not fit together, or the tensors are on no GPU.
    """
    launch, partial = plan_span_attention(
        q,
        k_cache,
        v_cache,
        lo,
        hi,
        scale=scale,
        block_table=block_table,
        block_size=block_size,
        request=request,
        rows_per_request=rows_per_request,
        softcap=softcap,
        num_splits=num_splits,
        tile_rows=tile_rows,
    )
    if launch is None:
        return partial
    launch.run()
    if partial.out.dim() == 3:
        return partial
    return merge_partials(partial.out, partial.lse, dtype=q.dtype)


def plan_span_attention(
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
    rows_per_request: int | None = None,
    softcap: float | None = None,
    num_splits: int | None = None,
    tile_rows: int | None = None,
) -> tuple[Launch | None, Partial]:
    """What `span_attention` launches, and where it writes.

    Returns:
        The launch, ``None`` where there is nothing to compute, and out and lse: `[T, N, V]` and
        `[T, N]`, or with one more dimension in front, of the splits.
    """
    _check(q, k_cache, v_cache, lo, hi, block_table, block_size, request)
    num_rows, num_heads, head_dim = q.shape
    num_kv_heads, num_slots, value_dim = v_cache.shape
    if not num_rows or not num_slots or (block_table is not None and not block_table.numel()):
        return None, empty(num_rows, num_heads, value_dim, q.dtype, q.device)
    group = num_heads // num_kv_heads
    table = block_table
    if table is None or block_size is None:
        num_requests, max_keys = 1, num_slots
    else:
        num_requests, max_keys = len(table), table.shape[1] * block_size
    shape = tile_shape(
        head_dim=head_dim,
        value_dim=value_dim,
        group=group,
        rows_per_request=rows_per_request or ceil_div(num_rows, num_requests),
        itemsize=q.dtype.itemsize,
        tile_rows=tile_rows,
    )
    programs = ceil_div(num_rows, shape.tokens) * num_kv_heads * ceil_div(group, shape.heads)
    splits = num_splits or split_count(programs, max_keys, processors(q.device))
    several = () if splits == 1 else (splits,)
    dtype = q.dtype if splits == 1 else torch.float32
    out = torch.empty(*several, num_rows, num_heads, value_dim, dtype=dtype, device=q.device)
    lse = torch.empty(*several, num_rows, num_heads, dtype=torch.float32, device=q.device)
    args = {
        "q_ptr": q,
        "k_ptr": k_cache,
        "v_ptr": v_cache,
        "table_ptr": table,
        "request_ptr": request,
        "lo_ptr": lo,
        "hi_ptr": hi,
        "out_ptr": out,
        "lse_ptr": lse,
        "scale": float(scale),
        "softcap": float(softcap or 0.0),
        "num_rows": num_rows,
        "q_row": q.stride(0),
        "q_head": q.stride(1),
        "k_head": k_cache.stride(0),
        "k_slot": k_cache.stride(1),
        "v_head": v_cache.stride(0),
        "v_slot": v_cache.stride(1),
        "table_row": 0 if table is None else table.stride(0),
    }
    constants = {
        **_sizes(shape, shared=_is_prefix(v_cache, k_cache) and value_dim == shape.block_d),
        "GROUP": group,
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "VALUE_DIM": value_dim,
        "BLOCK_SIZE": block_size if table is not None else 0,
        "HAS_SOFTCAP": softcap is not None,
        "HAS_REQUEST": request is not None,
        "PARTIAL": splits > 1,
        # fp32 is asked for where fp32 is meant: TF32 keeps 10 bits of it
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "INTERPRETED": interpreted(span_kernel),
    }
    launch = Launch(span_kernel, (programs, splits), args, constants, shape.warps, shape.stages)
    return launch, Partial(out, lse)


def _sizes(shape: TileShape, shared: bool) -> dict[str, Any]:
    return {
        "HEADS": shape.heads,
        "TOKENS": shape.tokens,
        "BLOCK_M": shape.block_m,
        "BLOCK_N": shape.block_n,
        "BLOCK_D": shape.block_d,
        "BLOCK_REST": shape.block_rest,
        "BLOCK_V": shape.block_v,
        "SHARED": shared,
    }


def _is_prefix(v: Tensor, k: Tensor) -> bool:
    """Whether ``v`` is the first columns of ``k``."""
    return v.data_ptr() == k.data_ptr() and v.stride() == k.stride() and v.shape[2] <= k.shape[2]


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lo: Tensor,
    hi: Tensor,
    table: Tensor | None,
    block_size: int | None,
    request: Tensor | None,
) -> None:
    tensors = {"q": q, "k_cache": k, "v_cache": v, "lo": lo, "hi": hi}
    require(
        "attention needs q [T, N, H], k_cache [K, slots, H], v_cache [K, slots, V] with K dividing "
        "N, and lo, hi [T]",
        "pass tensors of these shapes",
        q.dim() == k.dim() == v.dim() == 3
        and k.shape[:2] == v.shape[:2]
        and q.shape[2] == k.shape[2]
        and k.shape[0] > 0
        and q.shape[1] % k.shape[0] == 0
        and lo.shape == hi.shape == q.shape[:1],
        **tensors,
    )
    require(
        "q, k_cache and v_cache are of one dtype, fp32, bf16 or fp16",
        'convert them, or use backend="math"',
        q.dtype == k.dtype == v.dtype and q.dtype in DTYPES,
        **tensors,
    )
    require(
        "rows of q, k_cache, v_cache, lo and hi are contiguous",
        "call contiguous() on what is not",
        all(t.stride(-1) == 1 or t.shape[-1] <= 1 for t in tensors.values()),
        strides={name: t.stride() for name, t in tensors.items()},
    )
    require(
        "a block table is [R, B] with contiguous rows, comes with the block size, and with a "
        "contiguous [T] of requests where R is above 1",
        "pass block_table, block_size and request together",
        (table is None and block_size is None and request is None)
        or (
            table is not None
            and table.dim() == 2
            and (table.stride(1) == 1 or table.shape[1] <= 1)
            and block_size is not None
            and block_size > 0
            and (request is not None or len(table) == 1)
            and (request is None or (request.shape == lo.shape and request.is_contiguous()))
        ),
        block_table=table,
        block_size=block_size,
        request=request,
    )
