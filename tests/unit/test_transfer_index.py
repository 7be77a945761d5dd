"""Which positions go from whom to whom: the index part of transfer, against dealing one by one."""

from __future__ import annotations

import pytest
import transfer_cases
from transfer_cases import Side

from cplayers.cache import Holding, InterleavedLayout, moves
from cplayers.errors import ConfigError


def holdings(side: Side) -> dict[int, Holding]:
    result = {}
    for rank in range(side.ranks):
        heads = side.heads(rank)
        layout = InterleavedLayout(*side.layout)
        result[rank] = Holding(layout, side.place(rank)[0], (heads.start, heads.stop))
    return result


def held(side: Side, rank: int, position: int, head: int) -> bool:
    cp_size, interleave, _ = side.layout
    return position // interleave % cp_size == side.place(rank)[0] and head in side.heads(rank)


def test_the_worked_example() -> None:
    old, new = InterleavedLayout(2, 2, 4), InterleavedLayout(3, 1, 4)
    found = moves(
        {rank: Holding(old, rank) for rank in range(2)},
        {rank: Holding(new, rank) for rank in range(3)},
        0,
        9,
    )
    assert {(m.source, m.target): m.positions.tolist() for m in found} == {
        (0, 0): [0],
        (1, 0): [3, 6],
        (0, 1): [1, 4],
        (1, 1): [7],
        (0, 2): [5, 8],
        (1, 2): [2],
    }
    assert sum(m.rows for m in found if m.source != m.target) == 7


@pytest.mark.parametrize("seed", range(60))
def test_everything_comes_once_from_somebody_who_has_it(seed: int) -> None:
    source, target, length, oldest = transfer_cases.draw(seed)
    found = moves(holdings(source), holdings(target), oldest, length)
    came: dict[tuple[int, int, int], int] = {}
    for move in found:
        assert len(move.positions)
        for position in move.positions.tolist():
            for head in range(*move.heads):
                place = move.target, position, head
                assert place not in came
                came[place] = move.source
                assert held(source, move.source, position, head)
    heads = range(max(1, source.model_heads))
    for rank in range(target.ranks):
        for position in range(oldest, length):
            for head in heads:
                wanted = held(target, rank, position, head)
                assert ((rank, position, head) in came) == wanted
                if wanted and rank < source.ranks and held(source, rank, position, head):
                    assert came[rank, position, head] == rank, "it was there already"


def test_copies_take_turns() -> None:
    source, target = Side((1, 4, 4), copies=2), Side((4, 4, 4))
    seats = {10 + rank: holding for rank, holding in holdings(target).items()}
    found = moves(holdings(source), seats, 0, 16)
    assert [(m.source, m.target) for m in found] == [(0, 10), (1, 11), (0, 12), (1, 13)]


def test_sources_that_lack_something_are_named() -> None:
    source, target = holdings(Side((2, 4, 4))), holdings(Side((1, 4, 4)))
    del source[1]
    with pytest.raises(ConfigError, match=r"sources \{0: \(0, \(0, 2\)\)\} for rank 0"):
        moves(source, target, 0, 8)
    assert len(moves(source, target, 0, 4)) == 1, "rank 1 had nothing of it"
    with pytest.raises(ConfigError, match="every position and KV head"):
        moves({}, target, 0, 1)
    assert moves({}, target, 3, 3) == []


def test_sources_of_several_groups_are_refused() -> None:
    layouts = InterleavedLayout(1, 4, 4), InterleavedLayout(2, 4, 4)
    with pytest.raises(ConfigError, match="one group holds a sequence in one layout"):
        moves({i: Holding(layout, 0) for i, layout in enumerate(layouts)}, {}, 0, 4)
