"""Sequences on their way into a cache: decided and verified, and not taken before `commit`.

A sequence is expected first, which names it and chooses its blocks; then its rows are filled in,
from shards or from what arrived over a group; then it counts. Rows wait beside the cache until all
of them are there and verified, so that a refusal leaves every length, block and hash as it was.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from cplayers.cache.header import (
    ShardHeader,
    require_fit,
    require_one_sequence,
    require_whole,
)
from cplayers.cache.sequences import SequenceState
from cplayers.cache.shard import BlockShard
from cplayers.errors import StateError, TransferError

if TYPE_CHECKING:
    from cplayers.cache.portable import PortableCache

MOST_FORGOTTEN = 2**20
"""Blocks that a sequence which comes may have forgotten, where the pool is smaller. A table lists
them too, at some 40 bytes each, and no row of a shard vouches for them."""


@dataclass
class Arrival:
    """One sequence that is expected.

    Attributes:
        seq: Its new name.
        state: Its blocks and length here.
        own: What this rank will hold of it.
        positions: Positions that this rank will hold, increasing, int64 `[T]`.
        rows: `[T, layers, features]`, filled in as they come.
        missing: Which values have not come yet, bool `[T, heads]`.
    """

    seq: Hashable
    state: SequenceState
    own: ShardHeader
    positions: Tensor
    rows: Tensor
    missing: Tensor

    def fill(self, positions: Tensor, heads: tuple[int, int], rows: Tensor) -> None:
        """Store rows that came.

        Args:
            positions: Of this rank, int64 `[N]`.
            heads: KV heads of the model, half-open, of this rank.
            rows: `[N, layers, features of these heads]`.
        """
        at = self.own.layout.local_index(positions) - self.start
        here = at.to(self.rows.device)
        came = rows.to(self.rows.device)
        if heads == self.own.holding.heads:
            self.rows[here] = came
        else:
            columns = self.own.columns(heads).to(self.rows.device)
            layers = torch.arange(self.rows.shape[1], device=self.rows.device)
            self.rows[here[:, None, None], layers[:, None], columns] = came
        first = self.own.first_head
        self.missing[at, heads[0] - first : heads[1] - first] = False

    @property
    def start(self) -> int:
        """Local index of the first of ``rows``."""
        return self.own.layout.count_before(self.state.oldest, self.own.cp_rank)


class Landing:
    """What one cache is about to take.

    Args:
        cache: The cache, which must not change before `commit`.

    Attributes:
        trial: The blocks that will be taken.
        arrivals: The sequences that will be added.
    """

    def __init__(self, cache: PortableCache) -> None:
        self.cache = cache
        self.trial = cache.pool.trial()
        self.arrivals: list[Arrival] = []

    def expect(
        self,
        seq: Hashable,
        header: ShardHeader,
        *,
        first_head: int = 0,
        tokens: Sequence[int] | None = None,
    ) -> Arrival:
        """Name a sequence that is to come, and choose its blocks.

        Args:
            seq: A new name.
            header: One of the exporting group.
            first_head: KV head of the model that is the first of this rank's.
            tokens: See `PortableCache.import_blocks`.

        Raises:
            TransferError: If it is of another model, or longer than a table may be.
            ConfigError: If the name is taken, or expected already.
            CacheFullError: If the pool cannot hold it.
        """
        cache = self.cache
        own = cache.blank(first_head=first_head)
        require_fit(header, own)
        cache._sequences.require_new(seq, [arrival.seq for arrival in self.arrivals])
        _require_bound(header, cache)
        hashes: list[bytes] = []
        if tokens is not None:
            hashes = cache._sequences.hash_units(tokens)
        elif header.layout.unit_tokens == cache.layout.unit_tokens:
            hashes = [bytes.fromhex(text) for text in header.hashes]
        state = cache._sequences.expect(seq, header.length, header.oldest, hashes, self.trial)
        positions = own.holding.positions(header.oldest, header.length)
        shape = (len(positions), own.num_layers, own.features)
        arrival = Arrival(
            seq,
            state,
            own,
            positions,
            torch.empty(shape, dtype=cache.dtype, device=cache.view_of_rank.device),
            torch.ones(len(positions), own.num_heads, dtype=torch.bool),
        )
        self.arrivals.append(arrival)
        return arrival

    def from_shards(
        self,
        seq: Hashable,
        shards: Sequence[BlockShard],
        *,
        first_head: int = 0,
        tokens: Sequence[int] | None = None,
        verify_all: bool = True,
    ) -> None:
        """Expect a sequence and fill it in from shards.

        Args:
            seq: A new name.
            shards: See `PortableCache.import_blocks`.
            first_head: KV head of the model that is the first of this rank's.
            tokens: See `PortableCache.import_blocks`.
            verify_all: Whether to require and verify also what this rank does not need.

        Raises:
            TransferError: If a shard is damaged or does not belong here, or some are missing.
            ConfigError: If the name is taken.
            CacheFullError: If the pool cannot hold it.
        """
        header = require_one_sequence([shard.header for shard in shards])
        own = self.cache.blank(first_head=first_head)
        for shard in shards:
            require_fit(shard.header, own)
            shard.require_shape()
        if verify_all:
            require_whole([shard.header for shard in shards])
        arrival = self.expect(seq, header, first_head=first_head, tokens=tokens)
        for shard in shards:
            _take(arrival, shard, verify_all)
        if arrival.missing.any():
            lacking = arrival.positions[arrival.missing.any(1)]
            raise TransferError(
                f"shards of ranks {sorted({shard.header.cp_rank for shard in shards})} of "
                f"{header.layout.cp_size}",
                f"{len(lacking)} tokens of this rank, from position {int(lacking[0])} on, are in "
                "none of them",
                "pass the shards of all ranks of the group that exported",
            )

    def commit(self) -> None:
        """Write what came and make the sequences count.

        Raises:
            StateError: If something has not come yet, or a block was taken meanwhile.
            ConfigError: If a name was taken meanwhile. The cache is unchanged, in either case.
        """
        for arrival in self.arrivals:
            if arrival.missing.any():
                raise StateError(f"{arrival.seq!r} has not come whole: fill it in before commit")
        self.cache.land(self)


def _require_bound(header: ShardHeader, cache: PortableCache) -> None:
    """Raise before anything is built of the sizes that a header states; alike on all ranks."""
    most = max(MOST_FORGOTTEN, cache.pool.num_blocks)
    forgotten = cache.layout.full_blocks(header.oldest)
    if forgotten > most:
        raise TransferError(
            f"a sequence of {header.length} tokens, of which {header.oldest} were forgotten",
            f"a table lists at most {most} forgotten blocks here, and these are {forgotten}",
            "start the sequence anew from the tokens that are still in a window",
        )


def _take(arrival: Arrival, shard: BlockShard, verify_all: bool) -> None:
    """Verify a shard, and fill in what it has and this rank still needs."""
    header, own = shard.header, arrival.own.holding
    low, high = max(shard.heads[0], own.heads[0]), min(shard.heads[1], own.heads[1])
    positions = header.holding.positions(header.oldest, header.length)
    needed = own.layout.owner(positions) == own.cp_rank if low < high else positions < 0
    if low < high:
        at = own.layout.local_index(positions[needed]) - arrival.start
        first = arrival.own.first_head
        needed[needed.clone()] = arrival.missing[at, low - first : high - first].any(1)
    rows, taken = shard.verified(needed, verify_all)
    if needed.any():
        mine = needed[taken].nonzero()[:, 0].to(rows.device)
        arrival.fill(positions[needed], (low, high), header.select(rows[mine], (low, high)))
