"""`span_attention` on a CPU: few query rows over paged keys, read where they are.

One call does all requests of a step, however their blocks lie: a key is looked up in the block
table, so that a fragmented one costs no copy. The work is spread over torch's threads, the keys of
a request in parts where heads are few.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cplayers.errors import ConfigError
from cplayers.ops.native.build import BuildError, library
from cplayers.ops.partial import Partial, empty

LANES = 16
"""Dimensions are multiples of it."""

DTYPES = (torch.float32, torch.bfloat16)
"""What it reads; it adds up in fp32."""


@cache
def _function(head_dim: int, value_dim: int, dtype: torch.dtype) -> Any:
    """The C function for these dimensions."""
    defines = [f"HEAD_DIM={head_dim}", f"VALUE_DIM={value_dim}"]
    if dtype == torch.bfloat16:
        defines.append("BF16")
    function = library("span_attention.c", tuple(defines)).span_attention
    address, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [address] * 9 + [number] * 11 + [ctypes.c_float, number]
    function.restype = ctypes.c_int
    return function


def unavailable(head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
    """Why there is no kernel for these dimensions on this machine, or ``None``.

    The first question compiles it, which takes about half a second, once per machine.

    Args:
        head_dim: H.
        value_dim: V.
        dtype: Of queries, keys and values.
    """
    return _reason(head_dim, value_dim, dtype)


# As `torch.compiler.assume_constant_result` does, which takes a second to import the compiler.
setattr(unavailable, "_dynamo_marked_constant", True)  # noqa: B010 - functions declare none


@cache
def _reason(head_dim: int, value_dim: int, dtype: torch.dtype) -> str | None:
    if dtype not in DTYPES:
        return f"it takes fp32 and bf16, q is {dtype}"
    if head_dim % LANES or value_dim % LANES or not value_dim:
        return f"it needs H and V to be multiples of {LANES}, got H={head_dim}, V={value_dim}"
    try:
        _function(head_dim, value_dim, dtype)
    except BuildError as error:
        return str(error)
    return None


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
) -> Partial:
    """Attend with each query row to its own run of keys of its request.

    Nothing is checked by value: block ids and requests that do not exist are read from wherever
    they point.

    Args:
        q: `[T, N, H]`, H contiguous; query head n reads KV head n // (N/K).
        k_cache: `[K, slots, H]`, H contiguous.
        v_cache: `[K, slots, V]`, V contiguous; may be a view of the first columns of ``k_cache``.
        lo: First key that each row sees, counted in its request, int64 `[T]`.
        hi: One past the last key that each row sees, int64 `[T]`; hi <= lo: it sees nothing.
        scale: Factor of q . k.
        block_table: Block ids, int32 `[S, B]`; ``None``: slots are keys, of all rows.
        block_size: Slots per block; needed with a table.
        request: Row of the table that each query row reads, int64 `[T]`, rows of one request one
            after another; ``None``: all read the first.

    Returns:
        out `[T, N, V]` in q's dtype and lse `[T, N]` in fp32, natural log; (0, -inf) for a row that
        sees nothing.

    Raises:
        ConfigError: No kernel can be had for these tensors (`unavailable`).
        MemoryError: There is none for the partial results.
    """
    (num_rows, num_heads, head_dim), (_, num_slots, value_dim) = q.shape, v_cache.shape
    refused = unavailable(head_dim, value_dim, q.dtype)
    if refused is not None:
        raise ConfigError(f"q {list(q.shape)} {q.dtype}", refused, 'use backend="math"')
    if not (len(v_cache) and num_heads % len(v_cache) == 0 and len(lo) == len(hi) == num_rows):
        raise ConfigError(
            f"q {list(q.shape)}, v_cache {list(v_cache.shape)}, lo and hi of {len(lo)}, {len(hi)}",
            "KV heads divide query heads, and each row has its span",
            "pass tensors of these shapes",
        )
    if not num_rows or not num_slots:
        return empty(num_rows, num_heads, value_dim, q.dtype, q.device)
    if request is None:
        request = torch.zeros_like(lo)
    table, size = block_table, block_size
    if table is None or size is None:
        table, size = lo.new_zeros(1, 1, dtype=torch.int32), num_slots
    # As an operator of torch only where it has to be one: the detour takes longer than the call.
    run = _operator if torch.compiler.is_compiling() else _call
    return Partial(*run(q, k_cache, v_cache, table, request, lo, hi, size, scale))


def _call(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    request: Tensor,
    lo: Tensor,
    hi: Tensor,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    (num_rows, num_heads, head_dim), (num_kv_heads, _, value_dim) = q.shape, v_cache.shape
    out = torch.empty(num_rows, num_heads, value_dim, dtype=q.dtype)
    lse = torch.empty(num_rows, num_heads)
    lo, hi, request = lo.contiguous(), hi.contiguous(), request.contiguous()
    tensors = (q, k_cache, v_cache, table, request, lo, hi, out, lse)
    failed = _function(head_dim, value_dim, q.dtype)(
        *[tensor.data_ptr() for tensor in tensors],
        num_rows,
        num_heads,
        num_kv_heads,
        block_size,
        table.stride(0),
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        v_cache.stride(0),
        v_cache.stride(1),
        scale,
        torch.get_num_threads(),
    )
    if failed:
        raise MemoryError(f"no memory for the partial results of {num_rows} rows")
    return out, lse


_operator = torch.library.custom_op(
    "cplayers::span_attention_cpu", _call, mutates_args=(), device_types="cpu"
)


@_operator.register_fake
def _shapes(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    table: Tensor,
    request: Tensor,
    lo: Tensor,
    hi: Tensor,
    block_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[2])
    return out, q.new_empty(q.shape[0], q.shape[1], dtype=torch.float32)
