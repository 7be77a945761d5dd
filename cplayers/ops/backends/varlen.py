"""Backend ``"varlen"``: torch's own FlashAttention for packed sequences, where spans are lengths.

`torch.nn.attention.varlen` knows lengths and causal masks aligned to the last key, no spans::

    rows that decode, on pages      each row is a sequence of one query over its first hi keys
    chunks of requests, on pages    each request is a sequence, causal, over the last row's keys
    contiguous keys                 full and causal tiles; a tile that needs a mask goes to "math"

What it takes are the limits of FlashAttention 2 in torch 2.12 and 2.13 (aten's flash_api.cpp): fp16
and bf16, H = V up to 256 in steps of 8, pages in steps of 256 slots. Of a step on smaller pages,
and of one whose spans are neither, it is called run by run.

It splits no keys on pages: with more than one split, torch writes only the first sequence's rows
(pytorch issue 194167, open in 2.13). So few requests leave most of a device idle, and ``"auto"``
never takes this backend.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cplayers.ops.backends.base import Backend, PagedKeys
from cplayers.ops.backends.math import KERNELS
from cplayers.ops.backends.tiled import Kernels
from cplayers.ops.device import refuse_kernels
from cplayers.ops.partial import Partial
from cplayers.ops.spans import Tile

PAGE = 256
"""The slots of a block are a multiple of it."""

MAX_DIM, DIM_STEP = 256, 8
"""Largest head dimension, and what all of them are multiples of."""

ARGUMENTS = (
    "return_aux",
    "scale",
    "window_size",
    "enable_gqa",
    "seqused_k",
    "block_table",
    "num_splits",
)
"""Arguments of ``varlen_attn`` that are used and that torch did not always have."""

FULL, CAUSAL = (-1, -1), (-1, 0)
"""Windows as FlashAttention says them: all keys; all up to a row's own, of the last row all."""


class Sequences(NamedTuple):
    """Query rows as sequences of S over pages.

    Attributes:
        block_table: Pages of each, int32 `[S, B]`.
        edges: First row of each, and the number of all rows, int32 `[S + 1]`.
        used: Keys of each, int32 `[S]`.
        most_rows: Rows of the longest.
    """

    block_table: Tensor
    edges: Tensor
    used: Tensor
    most_rows: int


def takes(keys: PagedKeys) -> bool:
    """Whether rows are sequences, as is known on the host, and blocks are pages.

    Args:
        keys: Of a step.
    """
    return keys.causal_rows is not None and keys.block_size % PAGE == 0


def sequences(keys: PagedKeys) -> Sequences:
    """What a step's rows are to ``varlen_attn``; no value is read from the device.

    Args:
        keys: That `takes` accepts.
    """
    device = keys.hi.device
    if keys.most_rows <= 1 or keys.causal_rows is None:
        edges = torch.arange(len(keys.hi) + 1, dtype=torch.int32, device=device)
        request, used = keys.request, keys.hi
    else:
        rows = [0, *accumulate(count for count in keys.causal_rows if count)]
        edges = torch.tensor(rows, dtype=torch.int32, device=device)
        last = edges[1:] - 1
        request, used = keys.request[last], keys.hi[last]
    return Sequences(keys.block_table[request], edges, used.int(), keys.most_rows)


def pages(cache: Tensor, block_size: int) -> Tensor:
    """A plane `[K, slots, H]` as pages `[blocks, block_size, K, H]`, in place.

    Args:
        cache: The plane.
        block_size: Slots per block.
    """
    heads, slots, dim = cache.shape
    paged = cache.view(heads, slots // block_size, block_size, dim)
    return paged.permute(1, 2, 0, 3)


def missing_arguments(function: Callable[..., Any]) -> list[str]:
    """Those of `ARGUMENTS` that a ``varlen_attn`` lacks.

    Args:
        function: Of some version of torch.
    """
    return [name for name in ARGUMENTS if name not in inspect.signature(function).parameters]


def refuse_shapes(q: Tensor, k: Tensor, v: Tensor, softcap: float | None) -> str | None:
    """Why FlashAttention cannot take tensors like these, wherever they are, or ``None``.

    Args:
        q: `[T, N, H]`.
        k: `[S, K, H]`.
        v: `[S, K, V]`.
        softcap: Soft cap on the logits, or ``None``.
    """
    dim, value_dim = q.shape[-1], v.shape[-1]
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"it takes bf16 and fp16, not {q.dtype}"
    if dim != value_dim or dim > MAX_DIM or dim % DIM_STEP:
        limits = f"H = V up to {MAX_DIM} in steps of {DIM_STEP}"
        return f"it takes {limits}, got H={dim}, V={value_dim}"
    if softcap is not None:
        return f"it has no softcap, {softcap} was asked for"
    if not q.stride(-1) == k.stride(-1) == v.stride(-1) == 1:
        return "it needs q, k and v contiguous in their last dimension"
    return None


@cache
def _refuse_torch() -> str | None:
    if torch.version.hip is not None:
        return "it runs on NVIDIA devices"
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    missing = missing_arguments(varlen_attn)
    return (
        f"varlen_attn of torch {torch.__version__} lacks {', '.join(missing)}" if missing else None
    )


def _refuse(q: Tensor, k: Tensor, v: Tensor, softcap: float | None) -> str | None:
    return refuse_kernels(q, k, v) or refuse_shapes(q, k, v, softcap) or _refuse_torch()


def _call(q: Tensor, k: Tensor, v: Tensor, *sizes: Any, **options: Any) -> Partial:
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    wanted = AuxRequest(lse=True)
    out, lse = varlen_attn(q, k, v, *sizes, return_aux=wanted, enable_gqa=True, **options)
    lse = lse.transpose(0, 1)  # it is [N, T], whatever the documentation of 2.13 says
    seen = lse < float("inf")  # +inf marks a row without keys, and NaN is one as well
    return Partial(torch.where(seen.unsqueeze(-1), out, 0.0), torch.where(seen, lse, -float("inf")))


def _run_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    keys: PagedKeys,
    *,
    scale: float,
    softcap: float | None = None,
) -> Partial:
    table, edges, used, most = sequences(keys)
    size = keys.block_size
    return _call(
        q,
        pages(k_cache, size),
        pages(v_cache, size),
        edges,
        edges,  # of keys: asked for, but pages and used say where they are and how many
        most,
        table.shape[1] * size,
        scale=scale,
        window_size=FULL if most == 1 else CAUSAL,
        seqused_k=used,
        block_table=table,
        num_splits=1,
    )


def _contiguous(window: tuple[int, int]) -> Callable[..., Partial]:
    def run(q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float | None) -> Partial:
        rows, keys = len(q), k.shape[1]
        of_rows, of_keys = (
            torch.arange(0, n + 1, n, dtype=torch.int32, device=q.device) for n in (rows, keys)
        )
        k, v = k.transpose(0, 1), v.transpose(0, 1)
        return _call(q, k, v, of_rows, of_keys, rows, keys, scale=scale, window_size=window)

    return run


_TILES = Kernels(_contiguous(FULL), _contiguous(CAUSAL), KERNELS.masked)


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
    out, lse = _TILES.run(q, k, v, lo, hi, scale=scale, softcap=softcap, tiles=tiles)
    return Partial(out.to(q.dtype), lse)  # a tile that went to "math" is in fp32


VARLEN = Backend("varlen", _run, _refuse, _run_paged, lambda *_: False, takes)
