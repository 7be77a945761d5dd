"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), and YaRN's scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate pairs of elements of every head; what pair i becomes stays where pair i was.

    Args:
        x: `[T, N, R]`, R even.
        cos: `[T, R]`, in x's dtype; the second half repeats the first.
        sin: `[T, R]`, likewise.
        interleaved: The pairs are (x[2i], x[2i+1]) in place of (x[i], x[i + R/2]). These are
            multiplied as complex numbers, for dtypes below fp32 in fp32.

    Returns:
        `[T, N, R]`, a new tensor in x's dtype.
    """
    if interleaved:
        return _rotate_interleaved(x, cos, sin)
    first, second = x.chunk(2, dim=-1)
    out = x * cos.unsqueeze(1)
    out += torch.cat([-second, first], dim=-1) * sin.unsqueeze(1)
    return out


def _rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    num_tokens, num_heads, dim = x.shape
    dtype = x.dtype
    if dtype not in (torch.float32, torch.float64):  # complex numbers have these two
        x, cos, sin = x.float(), cos.float(), sin.float()
    pairs = x.contiguous().view(num_tokens, num_heads, dim // 2, 2)
    cos, sin = cos[:, None, : dim // 2], sin[:, None, : dim // 2]
    if torch.compiler.is_compiling():  # compilers know neither complex numbers nor offsets
        a, b = pairs.unbind(-1)
        rotated = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1)
    else:
        # A complex view needs even strides and an even offset, which a slice of a wider projection
        # may not have; ``contiguous`` keeps a single row where it is.
        if pairs.storage_offset() % 2:
            pairs = pairs.clone()
        rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin))
    return rotated.view(num_tokens, num_heads, dim).to(dtype)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Magnitude that YaRN gives to queries and keys of a context stretched by ``factor``.

    ``0.1 * mscale * ln(factor) + 1``, after Peng et al. 2023 (arXiv:2309.00071), which has
    mscale = 1. DeepSeek's models multiply the softmax scale by its square, with their
    ``mscale_all_dim`` as ``mscale``.

    Args:
        factor: Stretched context length over the original one; up to 1 nothing is stretched.
        mscale: Weight of the logarithm; 0 gives 1.
    """
    return 1.0 if factor <= 1.0 else 0.1 * mscale * math.log(factor) + 1.0
