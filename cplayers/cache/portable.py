"""Taking a sequence out of a cache, and into another of any layout: the moving part of a cache.

    shards = [cache.export_blocks("a") for cache in group]            # one per rank of the group
    for cache in other_group:
        cache.import_blocks("a", shards)                              # each takes what it owns

Export copies and changes nothing. Import verifies first and writes then; see `Landing`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from cplayers.cache.blocks import BlockPool
from cplayers.cache.header import ShardHeader
from cplayers.cache.landing import Landing
from cplayers.cache.layouts import InterleavedLayout
from cplayers.cache.sequences import SequenceState, SequenceTable
from cplayers.cache.shard import BlockShard
from cplayers.cache.spec import CacheSpec
from cplayers.cache.storage import Storage
from cplayers.cache.view import RankView, Writes
from cplayers.errors import ConfigError, TransferError


class PortableCache:
    """What `PagedKVCache` can do with whole sequences; its base class, not used by itself."""

    spec: CacheSpec
    layout: InterleavedLayout
    dtype: torch.dtype
    num_layers: int
    view_of_rank: RankView
    pool: BlockPool
    _sequences: SequenceTable
    storage: Storage
    _pending: object | None

    def export_blocks(
        self, seq: Hashable, *, first_head: int = 0, model_heads: int | None = None
    ) -> BlockShard:
        """A copy of this rank's non-empty blocks of ``seq``, with a checksum each.

        Only committed tokens are exported, and none that were forgotten.

        Args:
            seq: The sequence, which stays in this cache.
            first_head: KV head of the model that is the first of this rank's, where tensor
                parallelism spreads KV heads.
            model_heads: KV heads of the model, all ranks together. An import that is not given
                those of the last ranks notices it from this.

        Raises:
            ConfigError: If ``seq`` is unknown, or the model has no such heads.
        """
        header = self.describe(seq, first_head=first_head, model_heads=model_heads)
        positions = header.holding.positions(header.oldest, header.length)
        return BlockShard.of(header, self.rows_at(seq, positions))

    def import_blocks(
        self,
        seq: Hashable,
        shards: Sequence[BlockShard],
        *,
        first_head: int = 0,
        tokens: Sequence[int] | None = None,
        agree: Callable[[bool], bool] | None = None,
    ) -> int:
        """Add a sequence from the shards that a group exported, of any layout.

        Everything is verified before anything is written. Prefixes become findable here where the
        hashes that came with the shards fit this layout, or where ``tokens`` are given.

        Args:
            seq: A new name.
            shards: Those of the exporting group; copies may be there more than once. With
                ``agree``, those of which this rank needs nothing may be left out.
            first_head: KV head of the model that is the first of this rank's.
            tokens: Token ids of the prompt, as for `add`; taken at their word.
            agree: ``agree(ok)`` says whether all ranks of this group have verified their part,
                e.g. by an all-reduce; it is called once on every rank. Without it each rank wants
                all shards and verifies every block of them, so that all ranks that are given the
                same ones decide alike without talking. That shards of the model's last KV heads
                are missing shows only if they were exported with ``model_heads``.

        Returns:
            Tokens of the sequence.

        Raises:
            TransferError: If a shard is damaged, of another model or of another export, if some
                are missing, or if another rank refuses.
            ConfigError: If the name is taken.
            CacheFullError: If the pool cannot hold the sequence.
        """
        # In a list, since an error that a local names keeps that frame, and with it what came,
        # until the garbage collector looks.
        refusals: list[Exception] = []
        landing = Landing(self)
        try:
            landing.from_shards(
                seq, shards, first_head=first_head, tokens=tokens, verify_all=agree is None
            )
        except Exception as error:  # told to the other ranks first, then raised
            refusals.append(error)
        if agree is not None and not agree(not refusals) and not refusals:
            raise TransferError(
                f"an import of {seq!r} that another rank refused",
                "a group takes a sequence on all ranks or on none",
                "see the error of that rank",
            )
        if refusals:
            raise refusals.pop()
        landing.commit()
        return self._sequences.get(seq).length

    def describe(
        self, seq: Hashable, *, first_head: int = 0, model_heads: int | None = None
    ) -> ShardHeader:
        """What `export_blocks` would export of ``seq``.

        Args:
            seq: The sequence.
            first_head: See `export_blocks`.
            model_heads: See `export_blocks`.

        Raises:
            ConfigError: If ``seq`` is unknown, or the model has no such heads.
        """
        return self._header(self._sequences.get(seq), first_head, model_heads)

    def blank(self, *, first_head: int = 0) -> ShardHeader:
        """What this rank would export of an empty sequence: its spec and its place.

        Args:
            first_head: See `export_blocks`.

        Raises:
            ConfigError: If there is no such head.
        """
        return self._header(SequenceState(), first_head, None)

    def _header(
        self, state: SequenceState, first_head: int, model_heads: int | None
    ) -> ShardHeader:
        header = ShardHeader(
            spec=type(self.spec).__name__,
            planes=self.spec.planes,
            value_dim=self.spec.value_dim,
            dtype=str(self.dtype),
            num_layers=self.num_layers,
            layout=self.layout,
            cp_rank=self.view_of_rank.cp_rank,
            first_head=first_head,
            model_heads=model_heads,
            length=state.length,
            oldest=state.oldest,
            hashes=tuple(unit.hex() for unit in state.hashes),
        )
        header.require_heads()
        return header

    def rows_at(self, seq: Hashable, positions: Tensor) -> Tensor:
        """A copy of what this rank stores of ``seq`` at its own ``positions``.

        Args:
            seq: The sequence.
            positions: Positions that this rank owns and that were not forgotten, int64 `[T]`.

        Returns:
            `[T, layers, features]`, see `cplayers.cache.shard`.
        """
        state = self._sequences.get(seq)
        slots = self.slots_of(state, positions).to(self.view_of_rank.device)
        width = sum(plane.heads * plane.dim for plane in self.spec.planes)
        rows = torch.empty(
            len(slots), self.num_layers, width, dtype=self.dtype, device=slots.device
        )
        for layer in range(self.num_layers):
            at = 0
            for plane in self.storage.view(layer, 0, self.storage.num_slots):
                features = plane.shape[1] * plane.shape[2]
                rows[:, layer, at : at + features] = plane[slots].flatten(1)
                at += features
        return rows

    def slots_of(self, state: SequenceState, positions: Tensor) -> Tensor:
        """Slot of each of ``positions``, which this rank owns, int64 `[T]` on the host.

        Args:
            state: Of the sequence.
            positions: Int64 `[T]`.
        """
        table = torch.tensor(state.table.ids, dtype=torch.long)
        return self.layout.slots(positions, table, self.view_of_rank.cp_rank)

    def share_slots(self, other: PortableCache) -> None:
        """Store in the slots of ``other`` from now on, though spread over another group.

        Which blocks are whose is then for the caller to say, see `BlockPool.lend`. A cache that
        only shares is best made with one block.

        Args:
            other: A cache of the same spec, layers, dtype and block size on this rank.

        Raises:
            ConfigError: If it is of another kind, or this cache holds sequences.
        """
        kinds = [
            (cache.spec, cache.num_layers, cache.dtype, cache.layout.block_size)
            for cache in (self, other)
        ]
        if kinds[0] != kinds[1] or self._sequences.names:
            raise ConfigError(
                f"slots of a cache of {kinds[1]} for one of {kinds[0]} with "
                f"{len(self._sequences.names)} sequences",
                "caches that share slots store the same, and begin empty",
                "make an empty cache of the same spec, layers, dtype and block size",
            )
        self.storage = other.storage
        self.pool.grow(other.pool.num_blocks)
        self._pending = None

    def land(self, landing: Landing) -> None:
        """Take the blocks that ``landing`` chose, write what arrived, and add its sequences.

        Args:
            landing: Verified, of this cache as it is now.

        Raises:
            ConfigError: If a name was taken meanwhile. Nothing is changed.
            StateError: If a block was. Nothing is changed.
        """
        for arrival in landing.arrivals:
            self._sequences.require_new(arrival.seq)
        self.pool.apply(landing.trial)
        try:
            self._write_rows(landing)
        except BaseException:
            self.pool.release(landing.trial.taken)
            raise
        for arrival in landing.arrivals:
            self._sequences.settle(arrival.seq, arrival.state)
        self._pending = None

    def _write_rows(self, landing: Landing) -> None:
        for arrival in landing.arrivals:
            slots = self.slots_of(arrival.state, arrival.positions)
            writes, at = Writes.of(slots, self.view_of_rank.device), 0
            planes = []
            for plane in self.spec.planes:
                part = arrival.rows[:, :, at : at + plane.heads * plane.dim]
                planes.append(part.view(*part.shape[:2], plane.heads, plane.dim))
                at += plane.heads * plane.dim
            for layer in range(self.num_layers):
                given = tuple(plane[:, layer] for plane in planes)
                self.storage.write(layer, writes, given)
