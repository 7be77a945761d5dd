"""What a cache stores per token, while it travels: one tensor `[T, heads, dim]` per plane.

Keys and values, or the one latent of MLA. Two forms of one message are used: *token-major* rows
`[T, elements]`, which can be picked and reordered, and *head-major* blocks, plane after plane as in
the cache, which attention reads fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from cplayers.cache import PagedKVCache, StepPlan

Planes = Sequence[Tensor]
Expand = Callable[[Planes], tuple[Tensor, Tensor]]
"""Planes to the keys `[S, K, H]` and values `[S, K, V]` that queries read."""


class CachedLayer(NamedTuple):
    """One layer of a cache during a step.

    Attributes:
        cache: This rank's cache.
        plan: The step.
        layer: Layer index in the cache.
    """

    cache: PagedKVCache
    plan: StepPlan
    layer: int


def elements(planes: Planes) -> int:
    """Elements of a token over all planes.

    Args:
        planes: `[T, heads, dim]` each.
    """
    return sum(plane.shape[1] * plane.shape[2] for plane in planes)


def token_major(planes: Planes) -> Tensor:
    """All planes of a token side by side, `[T, elements]`.

    Args:
        planes: `[T, heads, dim]` each.
    """
    parts = [plane.reshape(len(plane), plane.shape[1] * plane.shape[2]) for plane in planes]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def columns(rows: Tensor, like: Planes) -> Planes:
    """The inverse of `token_major`: views `[S, heads, dim]` of ``rows`` `[S, elements]`.

    Args:
        rows: Token-major rows.
        like: Planes of the same heads and dims.
    """
    parts = torch.split(rows, [plane.shape[1] * plane.shape[2] for plane in like], dim=1)
    return [part.view(-1, *plane.shape[1:]) for part, plane in zip(parts, like, strict=True)]


def head_major(planes: Planes, width: int) -> Tensor:
    """Plane after plane, head after head, ``width`` rows each, in one flat tensor.

    Args:
        planes: `[T, heads, dim]` each, T at most ``width``.
        width: Rows, zeros included.
    """
    flat = planes[0].new_zeros(width * elements(planes))
    for target, plane in zip(blocks(flat, planes, width), planes, strict=True):
        target[: len(plane)] = plane
    return flat


def blocks(flat: Tensor, like: Planes, width: int) -> Planes:
    """The inverse of `head_major`: views `[width, heads, dim]` of ``flat``.

    Args:
        flat: Head-major blocks.
        like: Planes of the same heads and dims.
        width: Rows.
    """
    parts = torch.split(flat, [width * plane.shape[1] * plane.shape[2] for plane in like])
    return [
        part.view(plane.shape[1], width, plane.shape[2]).transpose(0, 1)
        for part, plane in zip(parts, like, strict=True)
    ]
