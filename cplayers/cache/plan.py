"""`StepPlan`: all that the layers need to know about one step, built once, passed to every layer.

Rows. A step brings new tokens, packed request after request in the order given to ``plan``. The
rows of one rank are a part of them: first the *decode* rows (requests with cached context and few
new tokens, whole on every PCP rank), then the *prefill* rows (prompts, and further chunks of
prompts: this rank's zigzag share of the new tokens). Within either part the requests keep their
order. ``tokens`` maps rows to packed tokens.

Keys. Where new keys come to every rank, a layer holds the K/V of the decode rows, followed by those
of the prefill rows of every PCP rank, padded to ``prefill.width`` each. ``slot_mapping`` says where
each of them goes in this rank's cache, -1 where it is another rank's token or padding. Where they
are sent to their owners instead, `Exchange` says so.

Reading. A decode row sees the keys ``lo..hi`` of its sequence's local shard, the step's own tokens
included (`cplayers.ops.spans`). `StepPlan.paged` gives them to kernels that look up block tables,
`StepPlan.reads` lists them for others as runs of consecutive blocks. What prefill rows see is in
`cplayers.cache.prefill`. All of it takes the layer's sliding window, and is computed once per
window and step, whatever the number of layers.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from cplayers.cache.context import Context, Source
from cplayers.cache.prefill import Choice, Prefill
from cplayers.cache.reads import Read, build_reads, paged_keys
from cplayers.cache.tables import Request
from cplayers.cache.view import RankView, Writes
from cplayers.errors import StateError
from cplayers.ops import PagedKeys, Spans


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
        decode_choices: What layers have chosen for the decode rows, where there is a choice.
        is_static: Whether its tensors are buffers, see `cplayers.cache.static`.
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
    decode_choices: dict[Hashable, Choice] = field(repr=False)
    _view: RankView = field(repr=False)
    _requests: tuple[Request, ...] = field(repr=False)  # in the order of _order
    _num_decoding: int = field(repr=False)  # requests, the first of _requests
    _order: tuple[int, ...] = field(repr=False)
    _positions: Tensor = field(repr=False)  # on the host, as is _row_request
    _row_request: Tensor = field(repr=False)  # index into _requests
    _table: Tensor = field(repr=False)
    _table_rows: tuple[int, ...] = field(repr=False)  # of each of _requests
    is_static: bool = False
    _reads: dict[int | None, tuple[Read, ...]] = field(repr=False, default_factory=dict)
    _paged: dict[int | None, PagedKeys] = field(repr=False, default_factory=dict)
    _parts: dict[tuple[int | None, int | None, int], PagedKeys] = field(
        repr=False, default_factory=dict
    )

    @property
    def num_rows(self) -> int:
        """Rows of this rank (T)."""
        return self.positions.shape[0]

    @property
    def num_tokens(self) -> int:
        """Packed new tokens of the step (P)."""
        return sum(self.new)

    @property
    def last(self) -> Tensor:
        """Packed index of the last new token of each request that has one, in the order given."""
        self._require_plain("no requests: ask the plan that was loaded")
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
        """Block ids of each request as in ``row_order``, int64 `[R, B]`; -1: padding or gone."""
        width = max((request.blocks.size for request in self._requests), default=0)
        table = torch.full((len(self._requests), width), -1)
        for row, request in zip(table, self._requests, strict=True):
            ids = torch.tensor(request.blocks.since(request.dropped))
            row[request.dropped : request.blocks.size] = ids
        return table.to(self._view.device)

    @cached_property
    def spans(self) -> Spans:
        """lo, hi `[T]` over the keys of the row's sequence on this rank, cached and new."""
        lo, hi = self._view.spans(self._positions, None)
        return Spans(lo.to(self._view.device), hi.to(self._view.device))

    def explain(self) -> str:
        """What the step is, and what the layers that ran in it have chosen to move, and why."""
        decoding, chunks = self._num_decoding, len(self._requests) - self._num_decoding
        lines = [
            f"{self.num_tokens} new tokens: {decoding} requests decode with {self.num_decode} "
            f"rows, {chunks} bring prompts or chunks of them"
        ]
        for choice in self.decode_choices.values():
            lines.append(choice.explain(f"{self.num_decode} decode rows"))
        if self.prefill is not None:
            lines += [self.prefill.explain(choice) for choice in self.prefill.choices.values()]
        return "\n".join(lines)

    @cached_property
    def middle(self) -> int | None:
        """Decode row that begins the second half of their work, between two requests.

        ``None`` if there is but one request, or the step is in static buffers. It depends on
        lengths over all ranks alone.
        """
        ends: list[tuple[int, int]] = []  # rows and keys up to each request that has rows
        rows = keys = 0
        for request in self._requests[: self._num_decoding]:
            rows, keys = rows + request.new, keys + request.new * (request.cached + request.new)
            if request.new:
                ends.append((rows, keys))
        if len(ends) < 2:
            return None
        return min(ends[:-1], key=lambda end: abs(2 * end[1] - keys))[0]

    @cached_property
    def decode_context(self) -> Context:
        """The keys of the requests that decode, this step's included, which are in the cache."""
        self._require_plain("block tables alone: keys cannot be gathered from other ranks")
        sources, row1 = [], 0
        for request in self._requests[: self._num_decoding]:
            row0, row1 = row1, row1 + request.new
            if request.new:
                length = request.cached + request.new
                sources.append(Source(request, length, row0, row1))
        view, positions = self._view, self._positions[: self.num_decode]
        return Context(tuple(sources), view.layout, view.cp_rank, positions, view.device)

    def reads(self, window: int | None = None) -> tuple[Read, ...]:
        """Decode rows against the runs of their sequences' shards, runs out of reach left out.

        Raises:
            StateError: Of a step in static buffers, in which runs are not known.
        """
        self._require_plain("block tables, which this layer's backend does not look up")
        if window not in self._reads:
            requests = self._requests[: self._num_decoding]
            positions = self._positions[: self.num_decode]
            self._reads[window] = tuple(build_reads(requests, positions, self._view, window))
        return self._reads[window]

    def _require_plain(self, has: str) -> None:
        if self.is_static:
            raise StateError(
                f"a step in static buffers has {has}; remedy: run this layer on plans without "
                "buffers, or see what layer.local_backends() says and `StaticDecode` takes"
            )

    def paged(self, window: int | None = None, rows: slice | None = None) -> PagedKeys:
        """The same for a kernel that looks up block tables, which are those of this step.

        Args:
            window: Sliding window of the layer, or ``None``.
            rows: Some of the rows, those of whole requests; ``None``: all.

        Raises:
            StateError: Of a step in static buffers that were made without this window.
        """
        if window not in self._paged:
            self._require_plain(f"windows={list(self._paged)}, not window={window}")
            count = self._num_decoding
            self._paged[window] = paged_keys(
                self._requests[:count],
                self._table_rows[:count],
                self._table,
                self._positions[: self.num_decode],
                self._view,
                window,
            )
        if rows is None:
            return self._paged[window]
        at = window, rows.start, rows.stop
        if at not in self._parts:
            self._parts[at] = self._paged[window].part(rows)
        return self._parts[at]
