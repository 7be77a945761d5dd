"""Which keys a query row sees, as two integers, and how rows are cut into work without masks.

On every rank the local keys are kept in increasing global position, so a causal query sees a prefix
of them and one with a sliding window a contiguous run, ``[lo, hi)``. `spans` computes it.

By hand: 2 ranks, interleave 1, 6 tokens, of which positions 2..5 are new. Rank 0 holds positions
0, 2, 4, so the four rows see hi = 2, 2, 3, 3 of its keys; rank 1 holds 1, 3, 5: hi = 1, 2, 2, 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

MASKED_ROWS = 256
"""Most rows of a masked tile: its mask holds rows x keys elements, so this bounds memory."""

CALL_COST = 512
"""What one kernel call costs on top of its work, in row-key pairs (about 25 us on a CPU core).

A masked tile of up to that much extra work replaces the calls of the short runs that it covers.
"""


class Spans(NamedTuple):
    """Row i sees the local keys ``lo[i] .. hi[i] - 1``; none if hi <= lo. Both int64 `[T]`."""

    lo: Tensor
    hi: Tensor


class Tile(NamedTuple):
    """Rows ``row0..row1`` with the keys that they see, all plain ints.

    Kinds, for t = row1 - row0 rows:

    - ``"full"``: every row sees exactly ``[lo, hi)``.
    - ``"causal"``: row i of the tile sees ``[lo, lo + c + i + 1)`` with c = hi - lo - t: a prefix
      of c keys that all rows see, then a causal square.
    - ``"masked"``: the rows' own spans lie within ``[lo, hi)``, which they cover together.
    """

    row0: int
    row1: int
    lo: int
    hi: int
    kind: Literal["full", "causal", "masked"]


def spans(
    positions: Tensor, count_before: Callable[[Tensor], Tensor], window: int | None = None
) -> Spans:
    """Spans of causal queries over the keys that one rank holds.

    Args:
        positions: Global position of each query row, int `[T]`, in any order.
        count_before: For each n, how many positions below n the rank holds.
        window: A query at p sees positions p - window + 1 .. p; ``None``: all up to p.
    """
    after = positions + 1
    hi = count_before(after).long()
    if window is None:
        return Spans(torch.zeros_like(hi), hi)
    return Spans(count_before((after - window).clamp_min(0)).long(), hi)


def tile_rows(lo: Tensor, hi: Tensor, max_rows: int = MASKED_ROWS) -> tuple[Tile, ...]:
    """Cut rows into tiles, most of which need no mask. Rows that see nothing are in none.

    Computed once per step and shared by all layers. Linear in T.

    Args:
        lo: First key of each row, int `[T]`.
        hi: One past the last key of each row, int `[T]`.
        max_rows: Most rows of a masked tile.
    """
    tiles: list[Tile] = []
    separate = 0  # cost of the runs that the last tile stands for, had they stayed apart
    for run in _runs(lo, hi, max_rows):
        cost = _cost(run)
        if tiles and tiles[-1].row1 == run.row0:
            both = _union(tiles[-1], run)
            overlap = min(tiles[-1].hi, run.hi) - max(tiles[-1].lo, run.lo)
            # As in _runs: without a common key the rows belong to different requests.
            if overlap > 0 and both.row1 - both.row0 <= max_rows and _cost(both) <= separate + cost:
                tiles[-1] = both
                separate += cost
                continue
        tiles.append(run)
        separate = cost
    return tuple(tiles)


def _union(a: Tile, b: Tile) -> Tile:
    return Tile(a.row0, b.row1, min(a.lo, b.lo), max(a.hi, b.hi), "masked")


def _cost(tile: Tile) -> int:
    rows = tile.row1 - tile.row0
    keys = tile.hi - tile.lo
    # A causal tile with a prefix takes three: prefix, square and their merge. A masked one may take
    # more than one as well, but is charged one: what it saves grows with each run that joins it.
    calls = 3 if tile.kind == "causal" and keys > rows else 1
    return calls * CALL_COST + rows * keys


_SAME, _GROW, _SLIDE, _BREAK = range(4)


def _runs(lo: Tensor, hi: Tensor, max_rows: int) -> Iterator[Tile]:
    """Maximal runs of rows of one kind, in row order; sliding ones cut to ``max_rows``."""
    if len(lo) == 1:  # decode of one request: skip the vectorised machinery
        first, last = int(lo), int(hi)
        if last > first:
            yield Tile(0, 1, first, last, "full")
        return
    if not len(lo):
        return
    # The relation of each row to the next, then runs of equal relations.
    lo_step, hi_step, sees = lo.diff(), hi.diff(), hi > lo
    linked = sees[1:] & sees[:-1] & (hi_step >= 0) & (hi_step <= 1)
    relation = torch.full_like(lo_step, _BREAK)
    # Without a common key the two rows belong to different requests.
    relation[linked & (lo_step == 1) & (hi[:-1] > lo[1:])] = _SLIDE
    flat = linked & (lo_step == 0)
    relation[flat] = hi_step[flat]  # 0 is _SAME, 1 is _GROW
    kinds, counts = torch.unique_consecutive(relation, return_counts=True)
    los, his = lo.tolist(), hi.tolist()

    def tile(row0: int, row1: int, kind: Literal["full", "causal", "masked"]) -> Iterator[Tile]:
        if his[row0] > los[row0]:
            yield Tile(row0, row1, los[row0], his[row1 - 1], kind)

    row = edge = 0  # `row` is the first row in no run yet; edge e links rows e and e + 1
    for kind, count in zip(kinds.tolist(), counts.tolist(), strict=True):
        edge += count
        if kind == _BREAK:
            while row < edge:
                yield from tile(row, row + 1, "full")
                row += 1
        elif row < edge:
            if kind == _SLIDE:
                while row <= edge:
                    stop = min(row + max_rows, edge + 1)
                    yield from tile(row, stop, "masked" if stop - row > 1 else "full")
                    row = stop
            else:
                yield from tile(row, edge + 1, "full" if kind == _SAME else "causal")
                row = edge + 1
    if row < len(los):
        yield from tile(row, row + 1, "full")
