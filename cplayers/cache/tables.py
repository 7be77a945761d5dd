"""Block tables that only grow, so that a plan refers to them instead of copying them.

A sequence of 100,000 tokens has thousands of blocks, and a decode step adds none or one of them. A
plan therefore keeps a `TableView`: so many blocks of the sequence's table, then a short tail that
the step adds or replaces. A table is never changed but at its end; cutting one makes a new table.
Hence a view stays true for as long as anybody holds it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable
from itertools import pairwise
from typing import NamedTuple

from cplayers.errors import StateError


class BlockTable:
    """Block ids of a sequence, and where its runs of consecutive ids begin.

    Args:
        ids: Block ids to begin with.
    """

    __slots__ = ("ids", "starts")

    def __init__(self, ids: Iterable[int] = ()) -> None:
        self.ids: list[int] = []
        self.starts: list[int] = []
        self.extend(ids)

    def extend(self, ids: Iterable[int]) -> None:
        """Append ``ids``."""
        for block in ids:
            if not self.ids or block != self.ids[-1] + 1:
                self.starts.append(len(self.ids))
            self.ids.append(block)

    def __len__(self) -> int:
        return len(self.ids)


class TableView(NamedTuple):
    """The first ``keep`` blocks of ``table``, then ``tail``."""

    table: BlockTable
    keep: int
    tail: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of blocks."""
        return self.keep + len(self.tail)

    def since(self, first: int) -> list[int]:
        """Block ids from index ``first`` on."""
        return [*self.table.ids[first : self.keep], *self.tail[max(0, first - self.keep) :]]

    def runs(self, count: int, first: int = 0) -> list[tuple[int, int]]:
        """Blocks ``first..count - 1`` as runs of consecutive ids: (first id, number of blocks)."""
        ids, starts, stop = self.table.ids, self.table.starts, min(self.keep, count)
        runs: list[tuple[int, int]] = []
        if first < stop:
            inner = starts[bisect_right(starts, first) : bisect_left(starts, stop)]
            runs = [(ids[start], end - start) for start, end in pairwise([first, *inner, stop])]
        for block in self.tail[max(0, first - self.keep) : max(0, count - self.keep)]:
            if runs and block == sum(runs[-1]):
                runs[-1] = runs[-1][0], runs[-1][1] + 1
            else:
                runs.append((block, 1))
        return runs


class Request(NamedTuple):
    """One sequence in a step.

    Attributes:
        seq: Name of the sequence.
        cached: Its tokens before the step.
        new: Its tokens in the step.
        blocks: All its blocks, those of the step included.
        first_open: Index of the first block that was not full on every rank before the step.
        oldest: Tokens before this position may be gone.
        dropped: Blocks at the front that are gone.
    """

    seq: Hashable
    cached: int
    new: int
    blocks: TableView
    first_open: int
    oldest: int = 0
    dropped: int = 0

    def require_kept(self, window: int | None) -> None:
        """Raise StateError if a new token sees some that were forgotten.

        Args:
            window: Sliding window, or ``None``.
        """
        first = 0 if window is None else max(0, self.cached + 1 - window)
        if self.new and first < self.oldest:
            raise StateError(
                f"a layer with window={window} reads {self.seq!r} from position {first} on, and "
                f"its tokens before {self.oldest} were forgotten; remedy: forget only what is out "
                "of the window of every layer"
            )
