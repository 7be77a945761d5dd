"""`StepPlan`: all that the layers need to know about one step, built once, passed to every layer.

Rows. A step brings new tokens, packed request after request in the order given to ``plan``. The
rows of one rank are a part of them: first the *decode* rows (requests with cached context and few
new tokens, whole on every PCP rank), then the *prefill* rows (prompts, and further chunks of
prompts: this rank's zigzag share of the new tokens). Within either part the requests keep their
order. ``tokens`` maps rows to packed tokens.

Keys. The K/V rows that a layer holds in a step are the decode rows, followed by the prefill rows of
every PCP rank after their all-gather, padded to ``prefill.width`` each. ``slot_mapping`` says where
each of them goes in this rank's cache, -1 where it is another rank's token or padding.

Reading. A decode row sees the keys ``lo..hi`` of its sequence's local shard, the step's own tokens
included (`cplayers.ops.spans`). `StepPlan.reads` lists them as runs of consecutive blocks, each a
zero-copy view of the cache. A prefill row sees new keys, `Prefill.shards_of` says which of each PCP
rank's, and the cached context of its request, `Prefill.context`. All of them take the layer's
sliding window, and are computed once per window and step.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from cplayers.cache.context import Context, Source
from cplayers.cache.layouts import InterleavedLayout
from cplayers.cache.reads import Read, build_reads
from cplayers.cache.tables import Request
from cplayers.cache.zigzag import PackedZigzag
from cplayers.ops import Spans, Tile, spans, tile_rows

SEGMENTS_MAX = 8
"""Up to so many consecutive segments are copied one by one; beyond, one indexed copy is cheaper."""


@dataclass(frozen=True)
class RankView:
    """What distinguishes one rank's plan from another's."""

    layout: InterleavedLayout
    cp_rank: int
    pcp_rank: int
    pcp_size: int
    device: torch.device


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
        if len(rows) == 1:  # one sequence that decodes: not worth the machinery below
            return cls(((int(rows), int(rows) + 1, int(slots)),))
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
class Shard:
    """This rank's prefill rows against the new keys that one PCP rank contributes."""

    lo: Tensor
    hi: Tensor
    tiles: tuple[Tile, ...]


@dataclass(frozen=True)
class Prefill:
    """The part of a step that brings prompts, or further chunks of prompts.

    Attributes:
        counts: Rows of each PCP rank.
        width: Rows of the largest, to which the others are padded for the all-gather.
        context: The cached tokens of its requests, which its rows see beside new ones.
    """

    counts: tuple[int, ...]
    width: int
    context: Context
    _zigzag: PackedZigzag = field(repr=False)
    _rank: int = field(repr=False)
    _device: torch.device = field(repr=False)
    _windows: dict[int | None, tuple[Shard, ...]] = field(repr=False, default_factory=dict)

    @property
    def shards(self) -> tuple[Shard, ...]:
        """`shards_of` a layer without a window."""
        return self.shards_of(None)

    def shards_of(self, window: int | None) -> tuple[Shard, ...]:
        """This rank's rows against the new keys of each PCP rank, as rows of its unpadded piece."""
        if window not in self._windows:
            shards = []
            for source in range(len(self.counts)):
                lo, hi = self._zigzag.spans(self._rank, source, window)
                tiles = tile_rows(lo, hi)
                shards.append(Shard(lo.to(self._device), hi.to(self._device), tiles))
            self._windows[window] = tuple(shards)
        return self._windows[window]


@dataclass(frozen=True)
class StepPlan:
    """One step of a batch of sequences on one rank; see the module's text.

    R requests, T rows of this rank, P packed tokens of the step, B blocks of the longest request.

    Attributes:
        seqs: Sequence of each request, in the order given.
        cached: Tokens of each in the cache before the step.
        new: New tokens of each.
        positions: Position of each row in its own sequence, int64 `[T]`.
        tokens: Packed token of each row, int64 `[T]`.
        num_decode: Decode rows.
        slot_mapping: Slot of each K/V row in this rank's cache, or -1.
        prefill: The new tokens of requests that do not decode, ``None`` if there are none.
        owner: PCP rank that computes each packed token (0 for decode), int64 `[P]`, on the host.
        index: Row of each packed token on its owner, int64 `[P]`, on the host.
        decode_writes: Where the K/V of the decode rows go.
        prefill_writes: Where each PCP rank's gathered prefill K/V go, one entry per rank.
        version: Number of the plan, counting up in one cache.
    """

    seqs: tuple[Hashable, ...]
    cached: tuple[int, ...]
    new: tuple[int, ...]
    positions: Tensor
    tokens: Tensor
    num_decode: int
    slot_mapping: Tensor
    prefill: Prefill | None
    owner: Tensor
    index: Tensor
    decode_writes: Writes
    prefill_writes: tuple[Writes, ...]
    version: int
    _view: RankView = field(repr=False)
    _requests: tuple[Request, ...] = field(repr=False)  # in the order of _order
    _num_decoding: int = field(repr=False)  # requests, the first of _requests
    _order: tuple[int, ...] = field(repr=False)
    _positions: Tensor = field(repr=False)  # on the host, as is _row_request
    _row_request: Tensor = field(repr=False)  # index into _requests
    _reads: dict[tuple[int | None, bool], tuple[Read, ...]] = field(
        repr=False, default_factory=dict
    )

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
        new = torch.tensor(self.new, dtype=torch.long)
        return (new.cumsum(0) - 1)[new > 0]

    @cached_property
    def row_order(self) -> Tensor:
        """Request (index into ``seqs``) of each part of the rows, decode first, int64 `[R]`."""
        return torch.tensor(self._order, dtype=torch.long)

    @cached_property
    def cu_seqlens_q(self) -> Tensor:
        """Bounds of the rows of each request, in the order of ``row_order``, int64 `[R + 1]`."""
        rows = self._row_request.bincount(minlength=len(self._order))
        return torch.cat([rows.new_zeros(1), rows.cumsum(0)]).to(self._view.device)

    @cached_property
    def is_decode(self) -> Tensor:
        """Whether a row decodes, which the first ``num_decode`` do, bool `[T]`."""
        return (torch.arange(self.num_rows) < self.num_decode).to(self._view.device)

    @cached_property
    def block_table(self) -> Tensor:
        """Block ids of each request as in ``row_order``, padded with -1, int64 `[R, B]`."""
        width = max((request.blocks.size for request in self._requests), default=0)
        table = torch.full((len(self._requests), width), -1)
        for row, request in zip(table, self._requests, strict=True):
            row[: request.blocks.size] = torch.tensor(request.blocks.since(0))
        return table.to(self._view.device)

    @cached_property
    def spans(self) -> Spans:
        """lo, hi `[T]` over the keys of the row's sequence on this rank, cached and new."""
        lo, hi = self._spans(self._positions, None)
        return Spans(lo.to(self._view.device), hi.to(self._view.device))

    def _spans(self, positions: Tensor, window: int | None) -> Spans:
        layout, rank = self._view.layout, self._view.cp_rank
        return spans(positions, lambda n: layout.count_before(n, rank), window)

    @cached_property
    def decode_context(self) -> Context:
        """The keys of the requests that decode, this step's included, which are in the cache."""
        sources, row1 = [], 0
        for request in self._requests[: self._num_decoding]:
            row0, row1 = row1, row1 + request.new
            if request.new:
                length = request.cached + request.new
                sources.append(Source(request.blocks, length, request.cached, row0, row1))
        view, positions = self._view, self._positions[: self.num_decode]
        return Context(tuple(sources), view.layout, view.cp_rank, positions, view.device)

    def reads(self, window: int | None = None) -> tuple[Read, ...]:
        """Decode rows against the runs of their sequences' shards, runs out of reach left out."""
        return self._some_reads(window, decode=True)

    def prefill_reads(self, window: int | None = None) -> tuple[Read, ...]:
        """The same of prefill rows, counted from their first one, where PCP does not split them.

        They see the step's own keys in the cache, which are to be written before.
        """
        return self._some_reads(window, decode=False)

    def _some_reads(self, window: int | None, *, decode: bool) -> tuple[Read, ...]:
        if (window, decode) not in self._reads:
            split, rows = self._num_decoding, self.num_decode
            requests = self._requests[:split] if decode else self._requests[split:]
            positions = self._positions[:rows] if decode else self._positions[rows:]
            spans = self._spans(positions, window)
            size, device = self._view.layout.block_size, self._view.device
            self._reads[window, decode] = tuple(build_reads(requests, spans, size, device))
        return self._reads[window, decode]
