"""The part of a step that brings prompts, or further chunks of prompts, split zigzag over PCP.

    packed   the new tokens of these requests, request after request, F in all
    piece    what one PCP rank computes of them: its rows, in the same order
    spread   [p, width] rows: the pieces of all ranks, each padded to the largest

Either the keys come to the rows: the new ones of every PCP rank (`Prefill.shards_of`), and the
cached ones of every DCP rank (`Prefill.context`). Or the rows of all ranks come to the keys that
this rank owns (`Prefill.reads`), the new ones among them, which are sent to their owners
(`Prefill.exchange`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from cplayers.cache.context import Context
from cplayers.cache.reads import Read, Shard, build_reads, paged_keys
from cplayers.cache.tables import Request
from cplayers.cache.view import RankView, Writes
from cplayers.cache.zigzag import PackedZigzag
from cplayers.ops import PagedKeys


@dataclass(frozen=True)
class Exchange:
    """Which new rows a rank sends to their owners among its PCP neighbours, and what it gets.

    Members of a DCP group with one place on the TP axis hold the same new keys, so that each sends
    to those of its own place only, and every owner gets each of its tokens once.

    Attributes:
        send: Rows of the own piece for each PCP rank, padded with row 0, int64 `[p, count]`.
        writes: Where the rows that arrive `[p * count]` go in the cache.
    """

    send: Tensor
    writes: Writes

    @property
    def count(self) -> int:
        """Rows that travel between each two ranks, padding included."""
        return self.send.shape[1]


class Choice(NamedTuple):
    """What a layer does in a step, and why.

    Attributes:
        strategy: Its name.
        sent: Bytes that each strategy would send per rank and layer, where they differ.
        why: The reason.
    """

    strategy: str
    sent: tuple[tuple[str, int], ...]
    why: str

    def explain(self, what: str) -> str:
        """The choice as text.

        Args:
            what: Of which rows.
        """
        costs = [f"  {name:11} {count:>14,} bytes a rank and layer" for name, count in self.sent]
        return "\n".join([f"{self.strategy}: {what}; {self.why}", *costs])


class Chunks(NamedTuple):
    """The requests of a prefill.

    Attributes:
        requests: In the order of their rows.
        table_rows: Row of each in ``table``.
        table: Block tables, as `cplayers.cache.table_store` has them.
    """

    requests: tuple[Request, ...]
    table_rows: list[int]
    table: Tensor


@dataclass(frozen=True)
class Prefill:
    """New tokens of the requests that do not decode; see the module's text.

    Attributes:
        counts: Rows of each PCP rank.
        width: Rows of the largest, to which the others are padded for the all-gather.
        context: The cached tokens of its requests, which its rows see beside new ones.
        choices: What layers have chosen, by all that the choice depends on: made once per step.
    """

    counts: tuple[int, ...]
    width: int
    context: Context
    choices: dict[Hashable, Choice] = field(repr=False)
    _zigzag: PackedZigzag = field(repr=False)
    _view: RankView = field(repr=False)
    _chunks: Chunks = field(repr=False)
    _positions: Tensor = field(repr=False)  # of the packed tokens, on the host, as _slots
    _slots: Tensor = field(repr=False)
    _shards: dict[int | None, tuple[Shard, ...]] = field(repr=False, default_factory=dict)
    _reads: dict[int | None, tuple[Read, ...]] = field(repr=False, default_factory=dict)
    _paged: dict[int | None, PagedKeys] = field(repr=False, default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Packed tokens (F)."""
        return len(self._positions)

    def explain(self, choice: Choice) -> str:
        """A choice for these rows as text.

        Args:
            choice: One of ``choices``.
        """
        cached = self.context.tokens
        return choice.explain(f"{self.num_tokens} new tokens over {cached} cached ones")

    @property
    def shards(self) -> tuple[Shard, ...]:
        """`shards_of` a layer without a window."""
        return self.shards_of(None)

    def shards_of(self, window: int | None) -> tuple[Shard, ...]:
        """This rank's rows against the new keys of each PCP rank, as rows of its unpadded piece."""
        if window not in self._shards:
            rank, device = self._view.pcp_rank, self._view.device
            self._shards[window] = tuple(
                Shard.of(self._zigzag.spans(rank, source, window), device)
                for source in range(len(self.counts))
            )
        return self._shards[window]

    def reads(self, window: int | None = None) -> tuple[Read, ...]:
        """All packed tokens against this rank's keys of their requests, cached and new.

        New keys are expected in the cache of their owners.
        """
        if window not in self._reads:
            reads = build_reads(self._chunks.requests, self._positions, self._view, window)
            self._reads[window] = tuple(reads)
        return self._reads[window]

    def paged(self, window: int | None = None) -> PagedKeys:
        """The same for a kernel that looks up block tables.

        Args:
            window: Sliding window of the layer, or ``None``.
        """
        if window not in self._paged:
            self._paged[window] = paged_keys(*self._chunks, self._positions, self._view, window)
        return self._paged[window]

    @cached_property
    def place(self) -> Tensor:
        """Index in the spread rows, flattened, of each packed token, int64 `[F]`."""
        return (self._zigzag.owner * self.width + self._zigzag.row).to(self._view.device)

    @cached_property
    def spread(self) -> Tensor:
        """The inverse: packed token of each spread row, 0 in the padding, int64 `[p, width]`."""
        index = self._zigzag.gathered(torch.arange(self.num_tokens), fill=0)
        return index.view(len(self.counts), self.width).to(self._view.device)

    @cached_property
    def max_exchanged(self) -> int:
        """`Exchange.count`, the same on all ranks."""
        owner = self._view.layout.owner(self._positions)
        pairs = self._zigzag.owner * self._view.layout.cp_size + owner
        return int(pairs.bincount().max())

    @cached_property
    def exchange(self) -> Exchange:
        """How new keys get to their owners; only where the cache is spread over PCP."""
        view, zigzag = self._view, self._zigzag
        place, ranks = view.cp_rank - view.pcp_rank, range(view.pcp_size)
        owner = view.layout.owner(self._positions)
        send = torch.zeros(view.pcp_size, self.max_exchanged, dtype=torch.long)
        slots = torch.full_like(send, -1)
        for rank in ranks:
            mine = owner[zigzag.piece(view.pcp_rank)] == place + rank
            rows = mine.nonzero().squeeze(1)
            send[rank, : len(rows)] = rows
            arriving = self._slots[zigzag.piece(rank)]
            arriving = arriving[arriving >= 0]
            slots[rank, : len(arriving)] = arriving
        return Exchange(send.to(view.device), Writes.of(slots.flatten(), view.device))


def build_prefill(
    zigzag: PackedZigzag,
    context: Context,
    view: RankView,
    chunks: Chunks,
    positions: Tensor,
    slots: Tensor,
) -> Prefill:
    """The prefill of a step.

    Args:
        zigzag: The split.
        context: The cached tokens of its requests.
        view: This rank.
        chunks: The requests that do not decode.
        positions: Of their packed tokens, `[F]`.
        slots: Of the same in this rank's cache, -1 where another rank owns one.
    """
    return Prefill(zigzag.counts, zigzag.width, context, {}, zigzag, view, chunks, positions, slots)
