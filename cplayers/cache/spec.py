"""What one token costs in the cache of one rank, and the user's cache settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

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

    @property
    def value_dim(self) -> int:
        """Dimension of the values that `keys_values` returns."""
        ...

    def keys_values(self, planes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys `[S, K, H]` and values `[S, K, V]` of stored rows, views of ``planes``.

        Args:
            planes: One `[S, heads, dim]` per plane.
        """
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

    @property
    def value_dim(self) -> int:
        """The dimension of a head."""
        return self.head_dim

    def keys_values(self, planes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The two planes."""
        keys, values = planes
        return keys, values


@dataclass(frozen=True)
class MLASpec:
    """What multi-head latent attention stores (DeepSeek-V2, arXiv:2405.04434, section 2.1).

    A token is one row for all heads: its normed latent, followed by the rotary part of its key with
    the position encoded. Attention in the latent reads the whole row as key and the latent as
    value, so that the row is stored once.

    Args:
        kv_lora_rank: Dimension of the latent (L).
        qk_rope_head_dim: Rotary dimensions (R).
    """

    kv_lora_rank: int
    qk_rope_head_dim: int

    def __post_init__(self) -> None:
        require_positive("kv_lora_rank", self.kv_lora_rank)
        require_positive("qk_rope_head_dim", self.qk_rope_head_dim)

    @property
    def planes(self) -> tuple[Plane, ...]:
        """One: latents and rotary parts side by side."""
        return (Plane("latent", 1, self.kv_lora_rank + self.qk_rope_head_dim),)

    @property
    def value_dim(self) -> int:
        """The dimension of the latent."""
        return self.kv_lora_rank

    def keys_values(self, planes: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """The rows `[S, 1, L + R]`, and their latents `[S, 1, L]`."""
        (latent,) = planes
        return latent, latent[..., : self.kv_lora_rank]


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
