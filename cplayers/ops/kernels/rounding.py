"""Narrowing fp32, also under Triton's interpreter, which truncates to bf16 instead of rounding."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def narrow(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """``x`` in another dtype, rounded to nearest, ties to even."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
        x = tl.where(x == x, rounded, x)  # a NaN would become a number
    return x.to(dtype)
