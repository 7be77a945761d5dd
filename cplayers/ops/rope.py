"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and YaRN's scale."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the pairs of every head by the angles of their position.

    Args:
        x: `[T, N, H]`, H even.
        cos: `[T, H]`, in x's dtype; the second half repeats the first.
        sin: `[T, H]`, likewise.
        interleaved: Whether pairs are (x[2i], x[2i + 1]); otherwise they are (x[i], x[i + H/2]).
            Pair i turns by angle i either way, and keeps its place.

    Returns:
        `[T, N, H]`, a new tensor.
    """
    if interleaved:
        half = x.shape[-1] // 2
        cos, sin = cos[:, None, :half], sin[:, None, :half]
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    out = x * cos.unsqueeze(1)
    out += torch.cat([-second, first], dim=-1) * sin.unsqueeze(1)
    return out


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's factor on queries and keys, ``0.1 * mscale * ln(factor) + 1`` (arXiv:2309.00071).

    Args:
        factor: Scaling factor of the context; up to 1 there is nothing to scale.
        mscale: Strength; DeepSeek's ``mscale_all_dim``.
    """
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
