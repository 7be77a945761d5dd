"""Which tokens of a sequence go from whom to whom, when a cache of another layout takes it over.

Plain arithmetic on layouts, without caches and process groups. Sources and targets are numbered
alike, so that a rank on both sides is one rank, and what it holds already is not sent.

Worked example, 9 tokens from ``InterleavedLayout(2, 2, 4)`` to ``InterleavedLayout(3, 1, 4)``,
sources 0, 1 and targets 0, 1, 2::

    position        0 1 2 3 4 5 6 7 8
    source owner    0 0 1 1 0 0 1 1 0
    target owner    0 1 2 0 1 2 0 1 2

Position 0 stays on rank 0. The others are sent: ``0 -> 1: 1, 4``, ``0 -> 2: 5, 8``,
``1 -> 0: 3, 6``, ``1 -> 2: 2``, and position 7 stays on rank 1.

KV heads may be spread over ranks as well, by tensor parallelism. A rank therefore holds a rectangle
of positions and heads, and a move is the part that two rectangles have in common. Where several
ranks hold a copy (over PCP, or over TP with fewer KV heads than ranks), a target that has one takes
its own, and the other targets take turns, so that no copy serves all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from cplayers.cache.layouts import InterleavedLayout
from cplayers.errors import ConfigError


class Holding(NamedTuple):
    """What one rank holds of a sequence.

    Attributes:
        layout: How the sequence is spread over the rank's group.
        cp_rank: Its place in that group.
        heads: KV heads of the model, half-open.
    """

    layout: InterleavedLayout
    cp_rank: int
    heads: tuple[int, int] = (0, 1)

    def positions(self, first: int, length: int) -> Tensor:
        """Its positions from ``first`` on and below ``length``, increasing, int64."""
        start = self.layout.count_before(first, self.cp_rank)
        stop = self.layout.count_before(length, self.cp_rank)
        return self.layout.position(torch.arange(start, stop), self.cp_rank)


class Move(NamedTuple):
    """Keys and values that rank ``target`` takes from rank ``source``, which may be itself.

    Attributes:
        source: Rank that holds them.
        target: Rank that needs them.
        positions: Positions, increasing, int64 `[T]`, at least one.
        heads: KV heads of the model, half-open.
    """

    source: int
    target: int
    positions: Tensor
    heads: tuple[int, int]

    @property
    def rows(self) -> int:
        """Tokens times heads."""
        return len(self.positions) * (self.heads[1] - self.heads[0])


def moves(
    sources: Mapping[int, Holding], targets: Mapping[int, Holding], first: int, length: int
) -> list[Move]:
    """How every target gets what it is to hold, exactly once, from the sources.

    Args:
        sources: Holding of each rank that has the sequence now; one layout.
        targets: Holding of each rank that is to have it.
        first: Positions before it were forgotten and do not travel.
        length: Tokens of the sequence.

    Returns:
        Moves by target, then by source position; alike on every rank that asks.

    Raises:
        ConfigError: If the sources differ in their layout, or together lack what a target needs.
    """
    layouts = {holding.layout for holding in sources.values()}
    if len(layouts) > 1:
        raise ConfigError(
            f"sources with layouts {sorted(map(str, layouts))}",
            "one group holds a sequence in one layout",
            "name the ranks of one group",
        )
    found: list[Move] = []
    for turn, (target, wanted) in enumerate(targets.items()):
        positions = wanted.positions(first, length)
        if not len(positions):
            continue
        if not layouts:
            raise _lack(sources, target, wanted)
        (layout,) = layouts
        owner = layout.owner(positions)
        for cp_rank in sorted(set(owner.tolist())):
            holders = {r: h.heads for r, h in sources.items() if h.cp_rank == cp_rank}
            own = positions[owner == cp_rank]
            for heads, ranks in _cut(wanted.heads, holders):
                if not ranks:
                    raise _lack(sources, target, wanted)
                source = target if target in ranks else ranks[turn % len(ranks)]
                found.append(Move(source, target, own, heads))
    return found


def _cut(
    wanted: tuple[int, int], holders: Mapping[int, tuple[int, int]]
) -> Iterator[tuple[tuple[int, int], list[int]]]:
    """Cut the heads ``wanted`` where holders begin or end; with each run, who holds all of it."""
    edges = {min(max(edge, wanted[0]), wanted[1]) for heads in holders.values() for edge in heads}
    for low, high in pairwise(sorted({*wanted, *edges})):
        yield (low, high), [r for r, heads in holders.items() if heads[0] <= low < heads[1]]


def _lack(sources: Mapping[int, Holding], target: int, wanted: Holding) -> ConfigError:
    held = {rank: (holding.cp_rank, holding.heads) for rank, holding in sources.items()}
    return ConfigError(
        f"sources {held} for rank {target} with heads {wanted.heads}",
        "the sources hold together every position and KV head of the sequence",
        "name all ranks of the group that holds it, as rank: (cp_rank, heads)",
    )
