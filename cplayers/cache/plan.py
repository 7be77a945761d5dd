"""`StepPlan`: all that the layers need to know about one step, built once, passed to every layer.

Rows. A step brings new tokens, packed request after request in the order given to ``plan``. The rows
of one rank are a part of them: first the *decode* rows (requests with cached context, whole on every
PCP rank), then the *prefill* rows (requests without cached context, this rank's zigzag share). Within
either part the requests keep their order. ``tokens`` maps rows to packed tokens.

Keys. The K/V rows that a layer holds in a step are the decode rows, followed by the prefill rows of
every PCP rank after their all-gather, padded to ``prefill.width`` each. ``slot_mapping`` says where
each of them goes in this rank's cache, -1 where it is another rank's token or padding.

Reading. A decode row sees the keys ``lo..hi`` of its sequence's local shard, the step's own tokens
included (`cplayers.ops.spans`). `reads` lists them as runs of consecutive blocks, each a zero-copy
view of the cache.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from cplayers.ops import Spans, Tile, tile_rows

SEGMENTS_MAX = 8
"""Up to so many consecutive segments are copied one by one; beyond, one indexed copy is cheaper."""


@dataclass(frozen=True)
class Writes:
    """Which K/V rows go to which slots: as consecutive segments, or as index tensors.

    Attributes:
        segments: ``(first row, last row + 1, first slot)``.
        rows: Row indices, where there are too many segments; else ``None``.
        slots: Slot of each of ``rows``.
    """

    segments: tuple[tuple[int, int, int], ...] = ()
    rows: Tensor | None = None
    slots: Tensor | None = None

    @classmethod
    def of(cls, slot_mapping: Tensor, device: torch.device) -> Writes:
        """From a slot per row, -1 for rows that are not written here."""
        rows = (slot_mapping >= 0).nonzero().squeeze(1)
        if not len(rows):
            return cls()
        slots = slot_mapping[rows]
        breaks = ((rows.diff() != 1) | (slots.diff() != 1)).nonzero().squeeze(1) + 1
        if len(breaks) >= SEGMENTS_MAX:
            return cls(rows=rows.to(device), slots=slots.to(device))
        edges = [0, *breaks.tolist(), len(rows)]
        starts = list(zip(rows[edges[:-1]].tolist(), slots[edges[:-1]].tolist(), strict=True))
        return cls(
            tuple(
                (row, row + stop - start, slot)
                for (row, slot), start, stop in zip(starts, edges[:-1], edges[1:], strict=True)
            )
        )


@dataclass(frozen=True)
class Read:
    """Rows ``row0..row1`` against one run of the cache, ``length`` keys from ``slot`` on.

    ``lo``, ``hi`` count from the run's first key; ``tiles`` is their `tile_rows`.
    """

    row0: int
    row1: int
    slot: int
    length: int
    lo: Tensor
    hi: Tensor
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Shard:
    """This rank's prefill rows against the new keys that one PCP rank contributes."""

    lo: Tensor
    hi: Tensor
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Prefill:
    """The part of a step whose requests have no cached context.

    Attributes:
        counts: Rows of each PCP rank.
        width: Rows of the largest, to which the others are padded for the all-gather.
        shards: One per PCP rank; spans index that rank's unpadded rows.
    """

    counts: tuple[int, ...]
    width: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class StepPlan:
    """One step of a batch of sequences on one rank; see the module's text.

    R requests, T rows of this rank, P packed tokens of the step, M blocks of the longest request.

    Attributes:
        seqs: Sequence of each request, in the order given.
        cached: Tokens of each in the cache before the step.
        new: New tokens of each.
        positions: Position of each row in its own sequence, int64 `[T]`.
        tokens: Packed token of each row, int64 `[T]`.
        cu_seqlens_q: Bounds of each request's rows, decode requests first, int64 `[R + 1]`.
        row_order: Request (index into ``seqs``) of each of those bounds, int64 `[R]`.
        is_decode: Whether a row has cached context, bool `[T]`; the first ``num_decode`` rows.
        block_table: Block ids of each request in the order of ``row_order``, padded with -1, `[R, M]`.
        slot_mapping: Slot of each K/V row in this rank's cache, or -1.
        spans: lo, hi `[T]` over this rank's cached and new keys of the row's sequence.
        prefill: The requests without cached context, ``None`` if there are none.
        owner: PCP rank that computes each packed token (0 for decode rows), int64 `[P]`.
        index: Row of each packed token on its owner, int64 `[P]`.
        decode_writes: Where the decode rows' K/V go.
        prefill_writes: Where each PCP rank's prefill K/V go, one entry per rank.
    """

    seqs: tuple[Hashable, ...]
    cached: tuple[int, ...]
    new: tuple[int, ...]
    positions: Tensor
    tokens: Tensor
    cu_seqlens_q: Tensor
    row_order: Tensor
    is_decode: Tensor
    num_decode: int
    block_table: Tensor
    slot_mapping: Tensor
    spans: Spans
    prefill: Prefill | None
    owner: Tensor
    index: Tensor
    decode_writes: Writes
    prefill_writes: tuple[Writes, ...]
    version: int
    _runs: tuple[tuple[int, int, tuple[tuple[int, int], ...]], ...] = field(repr=False, default=())
    _reads: dict[int | None, tuple[Read, ...]] = field(repr=False, default_factory=dict)

    @property
    def num_rows(self) -> int:
        """Rows of this rank (T)."""
        return len(self.positions)

    @property
    def num_tokens(self) -> int:
        """Packed new tokens of the step (P)."""
        return sum(self.new)

    @property
    def last(self) -> Tensor:
        """Packed index of the last new token of each request that has one, in the order given."""
        ends = torch.tensor(self.new).cumsum(0) - 1
        return ends[torch.tensor(self.new) > 0]

    def reads(self) -> tuple[Read, ...]:
        """Decode rows against the runs of their sequences' shards, computed at the first call."""
        if None not in self._reads:
            self._reads[None] = tuple(self._build_reads(*self.spans))
        return self._reads[None]

    def _build_reads(self, lo: Tensor, hi: Tensor) -> list[Read]:
        reads: list[Read] = []
        for row0, row1, runs in self._runs:
            start = 0
            for slot, length in runs:
                run_lo = (lo[row0:row1] - start).clamp(0, length)
                run_hi = (hi[row0:row1] - start).clamp(0, length)
                tiles = tile_rows(run_lo, run_hi)
                if tiles:
                    reads.append(Read(row0, row1, slot, length, run_lo, run_hi, tiles))
                start += length
        return reads
