"""What one token costs in the cache of one rank, and the user's cache settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from cplayers.cache.layouts import require_positive


@dataclass(frozen=True)
class Plane:
    """One tensor of the cache, `[heads, slots, dim]` per layer."""

    name: str
    heads: int
    dim: int


class CacheSpec(Protocol):
    """What the cache stores per token and layer on one rank."""

    @property
    def planes(self) -> tuple[Plane, ...]:
        """The tensors of one layer."""
        ...


@dataclass(frozen=True)
class GQASpec:
    """Keys and values of grouped-query attention.

    Args:
        num_kv_heads: KV heads that this rank stores (not those of the model).
        head_dim: Dimension of a head.
    """

    num_kv_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        require_positive("num_kv_heads", self.num_kv_heads)
        require_positive("head_dim", self.head_dim)

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Keys and values, alike."""
        return (
            Plane("k", self.num_kv_heads, self.head_dim),
            Plane("v", self.num_kv_heads, self.head_dim),
        )


def bytes_per_token(spec: CacheSpec, num_layers: int, dtype: torch.dtype) -> int:
    """Bytes that one token occupies on the rank that owns it, over all layers."""
    return num_layers * dtype.itemsize * sum(plane.heads * plane.dim for plane in spec.planes)


@dataclass(frozen=True)
class CacheConfig:
    """The user's settings of a paged cache.

    Args:
        block_size: Tokens per block on one rank.
        interleave_size: Tokens that go to one rank before the next one's turn.
        num_blocks: Virtual blocks; ``None`` lets the cache grow with what is asked of it.
    """

    block_size: int = 16
    interleave_size: int = 16
    num_blocks: int | None = None

    def __post_init__(self) -> None:
        require_positive("block_size", self.block_size)
        require_positive("interleave_size", self.interleave_size)
        if self.num_blocks is not None:
            require_positive("num_blocks", self.num_blocks)
