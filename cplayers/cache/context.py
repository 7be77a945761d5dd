"""Cached keys that travel to the queries, in pieces of bounded size: strategy ``gather_kv``.

    share of rank r   its tokens of a request, by local index 0, 1, 2, ...
    piece             local indices [a, b) of one or more requests, the same numbers on every rank
    gathered          [N * width] rows: what each rank has of the piece, padded to the width
    order             the real rows among them, request after request, in increasing position

A piece is cut from local indices and not from positions. So it has ``b - a`` rows of every rank
until a rank's share ends, whatever the interleave and the block size, and needs no alignment: all
that is ever padded is the end of a share, less than one interleave run of each rank and request.

Worked example: N = 2, interleave 1, context 13, workspace of 8 tokens, hence 4 rows a rank. Rank 0
holds 7 tokens and rank 1 holds 6. Piece 1 is the indices 0..3 of both, positions 0..7; piece 2 the
indices 4..6: 3 rows of rank 0 and 2 of rank 1, positions 8..12.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from cplayers.cache.layouts import InterleavedLayout
from cplayers.cache.reads import Shard
from cplayers.cache.tables import Request
from cplayers.ops import Spans, Tile, spans


@dataclass(frozen=True)
class Piece:
    """A part of the cached keys of some requests, and what this rank's rows see of it.

    N ranks, S keys, T rows.

    Attributes:
        width: Rows that every rank sends, padding included.
        reads: This rank's part: ``(slot, length, first row)``.
    """

    width: int
    reads: tuple[tuple[int, int, int], ...]
    _context: Context = field(repr=False)
    _cuts: tuple[Cut, ...] = field(repr=False)
    _window: int | None = field(repr=False)

    @cached_property
    def order(self) -> Tensor:
        """Index of each key in the gathered rows `[N * width]`, int64 `[S]`."""
        return self._gathered[0]

    @property
    def lo(self) -> Tensor:
        """First key in order that each row sees, int64 `[T]`."""
        return self._gathered[1].lo

    @property
    def hi(self) -> Tensor:
        """One past the last one."""
        return self._gathered[1].hi

    @property
    def tiles(self) -> tuple[Tile, ...]:
        """`tile_rows` of lo and hi."""
        return self._gathered[1].tiles

    @cached_property
    def _gathered(self) -> tuple[Tensor, Shard]:
        return self._context.in_order(self._cuts, self.width, self._window)

    @cached_property
    def shards(self) -> tuple[Shard, ...]:
        """What the rows see of each rank's part, as rows of it: for keys that come one by one."""
        return self._context.by_rank(self._cuts, self._window)


class Source(NamedTuple):
    """A request whose keys are gathered.

    Attributes:
        request: The request; its first new token has the lowest position that any rank's rows have.
        length: Its keys, all ranks together.
        row0: Its first row on this rank, counted among the rows that attend.
        row1: One past the last.
    """

    request: Request
    length: int
    row0: int
    row1: int


class Cut(NamedTuple):
    """Local indices ``start..stop`` of a source."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True)
class Context:
    """The keys in the cache of several requests, and this rank's rows of these requests.

    Attributes:
        sources: The requests.
    """

    sources: tuple[Source, ...]
    _layout: InterleavedLayout = field(repr=False)
    _rank: int = field(repr=False)
    _positions: Tensor = field(repr=False)  # of the rows, on the host
    _device: torch.device = field(repr=False)
    _pieces: dict[tuple[int, int | None], tuple[Piece, ...]] = field(
        repr=False, default_factory=dict
    )

    @property
    def tokens(self) -> int:
        """Keys of all requests and ranks."""
        return sum(source.length for source in self.sources)

    def width(self, window: int | None = None) -> int:
        """Rows that every rank sends over all pieces: the first rank's share, the largest.

        Args:
            window: Sliding window of the layer; what it hides from all rows does not travel.
        """
        return sum(stop - start for start, stop in (self._reach(s, window) for s in self.sources))

    def _reach(self, source: Source, window: int | None) -> tuple[int, int]:
        """Local indices that any row of any rank can see, the same numbers on every rank."""
        share = self._layout.count_before(source.length, 0)
        if window is None:
            return 0, share
        hidden = max(0, source.request.cached + 1 - window)
        if hidden >= source.length:
            return share, share
        return self._layout.count_before(hidden, self._layout.cp_size - 1), share

    def pieces(self, workspace_tokens: int, window: int | None = None) -> tuple[Piece, ...]:
        """Pieces of at most ``workspace_tokens`` rows of all ranks together, one a rank at least.

        Their number and widths are the same on all ranks. Computed once per step.

        Args:
            workspace_tokens: Rows that may be gathered at a time.
            window: Sliding window of the layer; keys that it hides from all rows are left out.
        """
        key = workspace_tokens, window
        if key not in self._pieces:
            width = max(1, workspace_tokens // self._layout.cp_size)
            self._pieces[key] = tuple(
                self._piece(tuple(cuts), window) for cuts in self._cut(width, window)
            )
        return self._pieces[key]

    def _cut(self, width: int, window: int | None) -> Iterator[list[Cut]]:
        cuts: list[Cut] = []
        room = width
        for index, source in enumerate(self.sources):
            source.request.require_kept(window)
            start, share = self._reach(source, window)
            while start < share:
                stop = min(share, start + room)
                cuts.append(Cut(index, start, stop))
                room -= stop - start
                start = stop
                if not room:
                    yield cuts
                    cuts, room = [], width
        if cuts:
            yield cuts

    def _piece(self, cuts: tuple[Cut, ...], window: int | None) -> Piece:
        reads: list[tuple[int, int, int]] = []
        row = 0
        for cut in cuts:
            reads += self._reads(self.sources[cut.source], cut, row)
            row += cut.stop - cut.start
        return Piece(row, tuple(reads), self, cuts, window)

    def in_order(self, cuts: Sequence[Cut], width: int, window: int | None) -> tuple[Tensor, Shard]:
        """Which gathered row each key of ``cuts`` is, and what the rows see of the keys.

        Args:
            cuts: Of one piece.
            width: Rows of every rank.
            window: Sliding window, or ``None``.
        """
        lo = torch.zeros(len(self._positions), dtype=torch.long)
        hi = torch.zeros_like(lo)
        order: list[Tensor] = []
        row = keys = 0
        ranks = torch.arange(self._layout.cp_size).unsqueeze(1)
        for cut in cuts:
            source = self.sources[cut.source]
            index = torch.arange(cut.start, cut.stop)
            positions = self._layout.position(index, ranks)
            real = positions < source.length
            gathered = (ranks * width + row + index - cut.start)[real]
            positions, by_position = positions[real].sort()
            order.append(gathered[by_position])
            rows = slice(source.row0, source.row1)
            seen = spans(self._positions[rows], partial(torch.searchsorted, positions), window)
            lo[rows], hi[rows] = keys + seen.lo, keys + seen.hi
            row += len(index)
            keys += len(positions)
        return torch.cat(order).to(self._device), Shard.of(Spans(lo, hi), self._device)

    def by_rank(self, cuts: Sequence[Cut], window: int | None) -> tuple[Shard, ...]:
        """What the rows see of each rank's part of ``cuts``, as rows of that part.

        Args:
            cuts: Of one piece.
            window: Sliding window, or ``None``.
        """
        shards = []
        for rank in range(self._layout.cp_size):
            lo = torch.zeros(len(self._positions), dtype=torch.long)
            hi = torch.zeros_like(lo)
            row = 0
            for cut in cuts:
                source, size = self.sources[cut.source], cut.stop - cut.start
                rows = slice(source.row0, source.row1)
                seen = spans(self._positions[rows], partial(self._held, source, rank), window)
                lo[rows] = row + (seen.lo - cut.start).clamp(0, size)
                hi[rows] = row + (seen.hi - cut.start).clamp(0, size)
                row += size
            shards.append(Shard.of(Spans(lo, hi), self._device))
        return tuple(shards)

    def _held(self, source: Source, rank: int, n: Tensor) -> Tensor:
        """How many of the keys of ``source`` before position n ``rank`` holds."""
        return self._layout.count_before(n.clamp(max=source.length), rank)

    def _reads(self, source: Source, cut: Cut, row: int) -> Iterator[tuple[int, int, int]]:
        """Runs of this rank's slots that hold its rows of ``cut``."""
        size = self._layout.block_size
        stop = min(cut.stop, self._layout.count_before(source.length, self._rank))
        first = cut.start // size
        at = first * size  # local index of the run's first slot
        for block, count in source.request.blocks.runs(-(-stop // size), first):
            begin, end = max(at, cut.start), min(at + count * size, stop)
            if begin < end:
                yield block * size + begin - at, end - begin, row + begin - cut.start
            at += count * size
