"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), half-split convention."""

from __future__ import annotations

import torch
from torch import Tensor


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + H/2]) of every head: ``x * cos + rotate_half(x) * sin``.

    Args:
        x: `[T, N, H]`, H even.
        cos: `[T, H]`, in x's dtype; the second half repeats the first.
        sin: `[T, H]`, likewise.

    Returns:
        `[T, N, H]`, a new tensor.
    """
    first, second = x.chunk(2, dim=-1)
    out = x * cos.unsqueeze(1)
    out += torch.cat([-second, first], dim=-1) * sin.unsqueeze(1)
    return out
