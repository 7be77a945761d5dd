"""Merging partial results, stacked or as they arrive packed; the rules are those of `ops.partial`.

One program has some of the `[T, N]` rows, and reads the n lse of each twice: once for the largest
and the sum, once for the weights. Where a weight is 0 the output is not even read.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from cplayers.ops.device import DTYPES
from cplayers.ops.kernels.launch import Launch, interpreted, require
from cplayers.ops.kernels.rounding import narrow
from cplayers.ops.kernels.tiles import ceil_div, ceil_power
from cplayers.ops.partial import Partial

PROGRAM_ELEMENTS = 2048
"""Elements of out that a program of 4 warps holds in fp32."""


@triton.jit
def _load_lse(ptr, index, mask, HALVES: tl.constexpr):
    """lse at ``index``; NaN and +inf as -inf. HALVES: its bits are two int16, the low one first."""
    if HALVES:
        low = tl.load(ptr + index, mask=mask, other=0).to(tl.uint16, bitcast=True)
        high = tl.load(ptr + index + 1, mask=mask, other=0).to(tl.uint16, bitcast=True)
        bits = (high.to(tl.uint32) << 16) | low.to(tl.uint32)
        lse = bits.to(tl.float32, bitcast=True)
    else:
        lse = tl.load(ptr + index, mask=mask, other=float("-inf"))
    return tl.where(mask & (lse < float("inf")), lse, float("-inf"))


@triton.jit(do_not_specialize=["count", "num_rows"])
def _merge_kernel(
    out_ptr,
    lse_ptr,
    merged_ptr,
    merged_lse_ptr,
    count,
    num_rows,
    out_part,
    out_row,
    lse_part,
    lse_row,
    VALUE_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    HALVES: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    top = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    first_lse = lse_ptr
    for _ in range(count):
        lse = _load_lse(lse_ptr, row * lse_row, live, HALVES)
        highest = tl.maximum(top, lse)
        # -inf - -inf would be NaN
        base = tl.where(highest == float("-inf"), 0.0, highest)
        total = total * tl.exp(top - base) + tl.exp(lse - base)
        top = highest
        lse_ptr += lse_part
    seen = total > 0
    base = tl.where(seen, top, 0.0)
    share = 1.0 / tl.where(seen, total, 1.0)
    column = tl.arange(0, BLOCK_V)
    wanted = live[:, None] & (column[None, :] < VALUE_DIM)
    acc = tl.zeros([ROWS, BLOCK_V], dtype=tl.float32)
    lse_ptr = first_lse
    for _ in range(count):
        lse = _load_lse(lse_ptr, row * lse_row, live, HALVES)
        weight = tl.exp(lse - base) * share
        read = wanted & (weight > 0)[:, None]
        at = out_ptr + row[:, None] * out_row + column[None, :]
        acc += weight[:, None] * tl.load(at, mask=read, other=0.0).to(tl.float32)
        lse_ptr += lse_part
        out_ptr += out_part
    lse = tl.where(seen, top + tl.log(tl.where(seen, total, 1.0)), float("-inf"))
    tl.store(merged_lse_ptr + row, lse, mask=live)
    at = merged_ptr + row[:, None] * VALUE_DIM + column[None, :]
    acc = narrow(acc, merged_ptr.dtype.element_ty, INTERPRETED)
    tl.store(at, acc, mask=wanted)


def merge_partials(out: Tensor, lse: Tensor, *, dtype: torch.dtype | None = None) -> Partial:
    """Merge n partials over disjoint keys.

    NaN and +inf lse count as -inf; where the weight is 0 the result is 0 whatever out held.

    Args:
        out: `[n, T, N, V]`, contiguous.
        lse: `[n, T, N]` in fp32, contiguous.
        dtype: Of the result; ``None``: that of ``out``.

    Returns:
        out `[T, N, V]` and lse `[T, N]` in fp32.

    Raises:
        ConfigError: Shapes, dtypes or strides do not fit, or the tensors are on no GPU.
    """
    launch, merged = plan_merge(out, lse, dtype=dtype)
    if launch is not None:
        launch.run()
    return merged


def merge_packed(packed: Tensor, dtype: torch.dtype) -> Partial:
    """Merge n partials as `pack` leaves them, without unpacking them first.

    Args:
        packed: `[n, T, N, W]`, contiguous: what arrived from n ranks.
        dtype: Of the out that was packed, and of the result.

    Returns:
        out `[T, N, V]` and lse `[T, N]` in fp32.

    Raises:
        ConfigError: Shapes, dtypes or strides do not fit, or the tensors are on no GPU.
    """
    launch, merged = plan_merge_packed(packed, dtype)
    if launch is not None:
        launch.run()
    return merged


def plan_merge(
    out: Tensor, lse: Tensor, *, dtype: torch.dtype | None = None
) -> tuple[Launch | None, Partial]:
    """What `merge_partials` launches, and where it writes."""
    require(
        "merging needs contiguous out [n, T, N, V] in fp32, bf16 or fp16 and lse [n, T, N] in "
        "fp32, n at least 1",
        "stack the partials, and convert them",
        out.dim() == 4
        and out.shape[:-1] == lse.shape
        and len(out) > 0
        and out.dtype in DTYPES
        and dtype in (None, *DTYPES)
        and lse.dtype == torch.float32
        and out.is_contiguous()
        and lse.is_contiguous(),
        out=out,
        lse=lse,
        dtype=dtype,
    )
    count, num_tokens, num_heads, value_dim = out.shape
    args = {"out_ptr": out, "lse_ptr": lse, "out_row": value_dim, "lse_row": 1}
    return _plan(args, (num_tokens, num_heads, value_dim), count, dtype or out.dtype, halves=False)


def plan_merge_packed(packed: Tensor, dtype: torch.dtype) -> tuple[Launch | None, Partial]:
    """What `merge_packed` launches, and where it writes."""
    require(
        "packed partials are a contiguous [n, T, N, W] of the packed dtype, fp32, bf16 or fp16, n "
        "at least 1",
        "pass what pack() returned, stacked",
        packed.dim() == 4
        and len(packed) > 0
        and packed.dtype == dtype
        and dtype in DTYPES
        and packed.is_contiguous(),
        packed=packed,
        dtype=dtype,
    )
    count, num_tokens, num_heads, width = packed.shape
    halves = dtype.itemsize == 2
    value_dim = width - (2 if halves else 1)
    bits = packed.view(torch.int16) if halves else packed
    args = {"out_ptr": packed, "lse_ptr": bits[..., value_dim:], "out_row": width, "lse_row": width}
    return _plan(args, (num_tokens, num_heads, value_dim), count, dtype, halves=halves)


def _plan(
    args: dict[str, Any],
    shape: tuple[int, int, int],
    count: int,
    dtype: torch.dtype,
    *,
    halves: bool,
) -> tuple[Launch | None, Partial]:
    num_tokens, num_heads, value_dim = shape
    device = args["out_ptr"].device
    merged = torch.empty(shape, dtype=dtype, device=device)
    merged_lse = torch.empty(num_tokens, num_heads, dtype=torch.float32, device=device)
    num_rows = num_tokens * num_heads
    if not num_rows:
        return None, Partial(merged, merged_lse)
    block_v = max(16, ceil_power(value_dim))
    rows = max(1, PROGRAM_ELEMENTS // block_v)
    args |= {
        "merged_ptr": merged,
        "merged_lse_ptr": merged_lse,
        "count": count,
        "num_rows": num_rows,
        "out_part": num_rows * args["out_row"],
        "lse_part": num_rows * args["lse_row"],
    }
    constants = {
        "VALUE_DIM": value_dim,
        "ROWS": rows,
        "BLOCK_V": block_v,
        "HALVES": halves,
        "INTERPRETED": interpreted(_merge_kernel),
    }
    launch = Launch(_merge_kernel, (ceil_div(num_rows, rows),), args, constants, 4, 2)
    return launch, Partial(merged, merged_lse)
