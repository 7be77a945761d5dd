"""Bytes of KV cache on a rank: exactly what `PagedKVCache` allocates.

    bytes per token = layers * elements stored per token and rank * bytes of an element
    blocks of one sequence = ceil(first rank's share of its tokens / block_size)
    cache = sequences * blocks * block_size * bytes per token

DeepSeek-R1 stores 512 + 64 values of 2 bytes in 61 layers, 70,272 bytes per token whatever tp is.
"""

from __future__ import annotations

import torch

from cplayers.attention.costs import Sizes
from cplayers.attention.heads import head_shard
from cplayers.cache import (
    CacheConfig,
    CacheSpec,
    GQASpec,
    InterleavedLayout,
    MLASpec,
    bytes_per_token,
)
from cplayers.mesh import Topology, validate
from cplayers.planning.shape import ModelShape

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
"""Types of the KV cache and of activations."""


def check_layout(
    shape: ModelShape, topology: Topology, cache: CacheConfig, *, replicate_q: bool = False
) -> None:
    """Ask the library's one judge whether a model can run on a layout.

    Args:
        shape: The model.
        topology: The ranks.
        cache: Block and interleave size.
        replicate_q: Whether a rank projects the queries of its whole DCP group.

    Raises:
        ConfigError: As `cplayers.mesh.validate` does.
    """
    validate(
        topology,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        block_size=cache.block_size,
        interleave_size=cache.interleave_size,
        replicate_q=replicate_q,
        window=shape.window,
    )


def cache_spec(shape: ModelShape, topology: Topology, *, replicate_q: bool = False) -> CacheSpec:
    """What a layer stores per token on a rank, as the attention layers say it.

    Args:
        shape: The model.
        topology: The ranks, in a valid layout.
        replicate_q: Whether a rank projects the queries of its whole DCP group.
    """
    if shape.latent is not None:
        return MLASpec(shape.latent.kv_rank, shape.latent.rope_dim)
    kv_heads = shape.num_kv_heads or 1
    shard = head_shard(topology, 0, shape.num_heads, kv_heads, replicate_q=replicate_q)
    return GQASpec(shard.num_kv, shape.head_dim)


def sizes_of(
    shape: ModelShape,
    topology: Topology,
    *,
    dtype: torch.dtype = torch.bfloat16,
    replicate_q: bool = False,
    combine: str = "a2a",
) -> Sizes:
    """What a layer moves per token, as the attention layers say it.

    Args:
        shape: The model.
        topology: The ranks, in a valid layout.
        dtype: Of activations.
        replicate_q: Whether a rank projects the queries of its whole DCP group.
        combine: How partial results are combined.
    """
    query_dim, value_dim = shape.head_dim, shape.value_dim
    if (latent := shape.latent) is not None:
        query_dim = latent.kv_rank + latent.rope_dim
        value_dim = shape.value_dim if replicate_q else latent.kv_rank
    planes = cache_spec(shape, topology, replicate_q=replicate_q).planes
    return Sizes(
        own_heads=shape.num_heads // topology.tp,
        query_dim=query_dim,
        value_dim=value_dim,
        stored=sum(plane.heads * plane.dim for plane in planes),
        itemsize=dtype.itemsize,
        combine=combine,
        replicated=replicate_q,
    )


class KVMemory:
    """KV cache of one rank.

    Args:
        shape: The model.
        topology: The ranks, in a valid layout.
        cache: Block and interleave size.
        dtype: Of the cache.
        replicate_q: Whether a rank projects the queries of its whole DCP group.
    """

    def __init__(
        self,
        shape: ModelShape,
        topology: Topology,
        cache: CacheConfig | None = None,
        dtype: torch.dtype = torch.bfloat16,
        *,
        replicate_q: bool = False,
    ) -> None:
        cache = cache or CacheConfig()
        self.layout = InterleavedLayout(topology.dcp, cache.interleave_size, cache.block_size)
        spec = cache_spec(shape, topology, replicate_q=replicate_q)
        self.token_bytes = bytes_per_token(spec, shape.num_layers, dtype)
        """Bytes of one token on the rank that owns it, over all layers."""

    def blocks(self, context: int, sequences: int = 1) -> int:
        """Blocks for ``sequences`` of ``context`` tokens each: ``num_blocks`` of the cache.

        Args:
            context: Tokens of a sequence.
            sequences: How many of them.
        """
        return sequences * self.layout.blocks(context)

    def nbytes(self, context: int, sequences: int = 1) -> int:
        """Bytes of these blocks.

        Args:
            context: Tokens of a sequence.
            sequences: How many of them.
        """
        return self.blocks(context, sequences) * self.layout.block_size * self.token_bytes

    def max_sequences(self, context: int, free: int) -> int:
        """How many sequences of ``context`` tokens fit.

        Args:
            context: Tokens of a sequence.
            free: Bytes for the cache.
        """
        return max(free, 0) // self.nbytes(context)

    def max_context(self, sequences: int, free: int) -> int:
        """The longest context of which ``sequences`` fit.

        Args:
            sequences: How many.
            free: Bytes for the cache.
        """
        block = self.layout.block_size * self.token_bytes
        rows = max(free, 0) // (sequences * block) * self.layout.block_size  # of the first rank
        # the next token would be the first rank's, who has no room
        rounds, rest = divmod(rows, self.layout.interleave_size)
        return rounds * self.layout.interleave_size * self.layout.cp_size + rest
