"""How chunks of prompts reach their keys: plans of all ranks against tokens dealt one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_context_pieces import BIG, WORKSPACES, Case, Key, pieces_of, seen_by

from cplayers.cache import StepPlan
from cplayers.cache.prefill import Prefill
from cplayers.cache.view import Writes

NEW = st.integers(0, 3) | st.integers(0, 30)
LENGTHS = st.lists(st.tuples(st.just(0) | st.integers(1, 40), NEW), min_size=1, max_size=5).map(
    tuple
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A cache over p PCP ranks and k places of each on the TP axis."""
    pcp, k = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    return Case(
        cp_size=pcp * k,
        interleave=draw(st.integers(1, 5) | st.integers(1, 40)),
        block=draw(st.integers(1, 16)),
        lengths=draw(LENGTHS),
        pcp_size=pcp,
        max_decode_tokens=draw(st.integers(0, 4) | st.just(40)),
        seed=draw(st.integers(0, 99)),
    )


def group(case: Case) -> list[StepPlan]:
    """The plans of the group's members, tp-major and pcp-minor: by rank in the group."""
    return [case._plan(cp, cp % case.pcp_size) for cp in range(case.cp_size)]


def owner(case: Case, key: Key) -> int:
    return key[1] // case.interleave % case.cp_size


def written(writes: Writes) -> dict[int, int]:
    """Slot by row."""
    slots: dict[int, int] = {}
    for row0, row1, slot in writes.segments:
        assert not slots.keys() & set(range(row0, row1))
        slots |= {row: slot + row - row0 for row in range(row0, row1)}
    if writes.rows is not None and writes.slots is not None:
        assert not slots
        slots = dict(zip(writes.rows.tolist(), writes.slots.tolist(), strict=True))
    return slots


def prefills(plans: list[StepPlan]) -> list[Prefill]:
    found = [plan.prefill for plan in plans if plan.prefill is not None]
    assert len(found) in (0, len(plans)), "alike on all ranks"
    return found


def pieces_of_ranks(case: Case, plans: list[StepPlan]) -> list[list[Key]]:
    """Each PCP rank's new tokens of requests that do not decode."""
    packed = case.packed
    return [
        [packed[token] for token in plan.tokens.tolist()[plan.num_decode :]]
        for plan in plans[: case.pcp_size]
    ]


TWO = Case(2, 1, 4, ((5, 6), (0, 3)), 2)
SPANNING = Case(4, 3, 2, ((13, 7), (0, 9), (6, 0), (2, 1)), 2, 1, 3)
FEWER_THAN_RANKS = Case(4, 2, 4, ((3, 1), (0, 2)), 4)
ALL_ON_ONE = Case(6, 16, 16, ((2, 9), (40, 5)), 3)


@given(cases())
@example(TWO)
@example(SPANNING)
@example(FEWER_THAN_RANKS)
@example(ALL_ON_ONE)
def test_each_new_token_reaches_the_slot_of_its_owner_once(case: Case) -> None:
    plans = group(case)
    found, p = prefills(plans), case.pcp_size
    if not found:
        return
    pieces = pieces_of_ranks(case, plans)
    arrived: list[Key] = []
    for rank, (plan, prefill) in enumerate(zip(plans, found, strict=True)):
        place, exchange = rank // p, prefill.exchange
        count = exchange.count
        assert exchange.send.shape == (p, count)
        assert count == found[0].exchange.count == prefill.max_exchanged
        slots, held = written(exchange.writes), case.stored(plan, rank)
        for source in range(p):
            # what the neighbour of the same place sends here, padding included
            sent = found[place * p + source].exchange.send[rank % p].tolist()
            for i, row in enumerate(sent):
                slot = slots.pop(source * count + i, -1)
                if slot < 0:
                    assert row == 0, "padding is row 0"
                    assert source * count + i not in slots
                else:
                    assert pieces[source][row] == held[slot]
                    arrived.append(held[slot])
            real = sum(owner(case, key) == rank for key in pieces[source])
            assert real <= count
        assert not slots, "every write has a row"
    chunks = [key for key in case.packed if not case.decodes(key[0])]
    assert sorted(arrived) == chunks
    # as few rows as the fullest pair of ranks needs
    pairs = [
        sum(owner(case, key) == rank for key in piece)
        for piece in pieces
        for rank in range(case.cp_size)
    ]
    assert found[0].max_exchanged == max(pairs)


def test_the_worked_example_of_an_exchange() -> None:
    """N = p = 2, I 1; 2 cached, 6 new: rank 0 has positions 2 3 and rank 1 has 4 5 6 7."""
    first, second = prefills(group(Case(2, 1, 4, ((2, 6),), 2)))
    assert [p.counts for p in (first, second)] == [(2, 4), (2, 4)]
    assert first.exchange.send.tolist() == [[0, 0], [1, 0]]
    assert second.exchange.send.tolist() == [[0, 2], [1, 3]]
    # local indices 1..3 on both, the first of them that of positions 2 and 3
    assert written(first.exchange.writes) == {0: 1, 2: 2, 3: 3}
    assert written(second.exchange.writes) == {0: 1, 2: 2, 3: 3}


@given(cases())
@example(TWO)
@example(SPANNING)
@example(FEWER_THAN_RANKS)
def test_place_and_spread_are_inverse(case: Case) -> None:
    plans = group(case)
    found = prefills(plans)
    if not found:
        return
    chunks = [key for key in case.packed if not case.decodes(key[0])]
    pieces = pieces_of_ranks(case, plans)
    for prefill in found:
        assert prefill.num_tokens == len(chunks)
        assert prefill.counts == tuple(map(len, pieces))
        assert prefill.spread.shape == (case.pcp_size, prefill.width)
        spread, place = prefill.spread.flatten(), prefill.place
        assert spread[place].tolist() == list(range(len(chunks)))
        assert len(set(place.tolist())) == len(chunks)
        for rank, piece in enumerate(pieces):
            tokens = prefill.spread[rank].tolist()
            assert [chunks[token] for token in tokens[: len(piece)]] == piece
            assert tokens[len(piece) :] == [0] * (prefill.width - len(piece))
            at = rank * prefill.width
            assert place[tokens[: len(piece)]].tolist() == list(range(at, at + len(piece)))


# The parts of cached context, one DCP rank after another


def parts_of(
    case: Case, plans: list[StepPlan], decode: bool, workspace: int, window: int | None
) -> Iterator[list[list[Key | None]]]:
    """For each piece, by DCP rank: the key in each row of its part, ``None`` in the padding."""
    ranks = [pieces_of(plan, decode, workspace, window) for plan in plans]
    stored = [case.stored(plan, rank) for rank, plan in enumerate(plans)]
    for pieces in zip(*ranks, strict=True):
        parts: list[list[Key | None]] = []
        for piece, held in zip(pieces, stored, strict=True):
            part: list[Key | None] = [None] * piece.width
            for slot, length, row in piece.reads:
                part[row : row + length] = [held[slot + i] for i in range(length)]
            assert len(part) == piece.width
            parts.append(part)
        yield parts


WINDOWS = st.none() | st.integers(1, 9) | st.integers(1, 64)


@given(cases(), WORKSPACES, WINDOWS)
@example(TWO, 4, 3)
@example(SPANNING, 8, None)
@example(SPANNING, 5, 4)
@example(ALL_ON_ONE, 12, 1)
@example(ALL_ON_ONE, BIG, 17)
def test_each_row_sees_its_keys_of_each_ranks_part(
    case: Case, workspace: int, window: int | None
) -> None:
    plans = group(case)
    packed = case.packed
    for decode in (False, True):
        parts = list(parts_of(case, plans, decode, workspace, window))
        for plan in plans:
            rows = [packed[token] for token in plan.tokens.tolist()]
            rows = rows[: plan.num_decode] if decode else rows[plan.num_decode :]
            seen: list[list[Key]] = [[] for _ in rows]
            for piece, by_rank in zip(
                pieces_of(plan, decode, workspace, window), parts, strict=True
            ):
                assert len(piece.shards) == case.cp_size
                for shard, part in zip(piece.shards, by_rank, strict=True):
                    tiled = seen_by(shard.tiles, shard.lo, shard.hi)
                    for i, (seq, position) in enumerate(rows):
                        first = 0 if window is None else position - window + 1
                        visible = [
                            key
                            for key in part
                            if key and key[0] == seq and first <= key[1] <= position
                        ]
                        assert part[int(shard.lo[i]) : int(shard.hi[i])] == visible
                        assert part[slice(*tiled[i])] == visible
                        seen[i] += visible
            for (seq, position), visible in zip(rows, seen, strict=True):
                first = 0 if window is None else max(0, position - window + 1)
                last = position if decode else case.lengths[seq][0] - 1
                assert sorted(visible) == [(seq, p) for p in range(first, last + 1)]


@given(cases(), WORKSPACES, st.integers(1, 30))
@example(Case(2, 1, 4, ((40, 5),), 2), 4, 6)
@example(Case(4, 3, 4, ((40, 5), (3, 9)), 2, 0, 3), 4, 1)
def test_what_no_window_reaches_does_not_travel(case: Case, workspace: int, window: int) -> None:
    """All that is sent beyond it is the rest of one round of interleaved runs, per request."""
    plans = group(case)
    for decode in (False, True):
        for parts in parts_of(case, plans, decode, workspace, window):
            for seq, position in [key for part in parts for key in part if key]:
                reach = case.lengths[seq][0] + 1 - window
                assert position >= reach - case.interleave * case.cp_size


@pytest.mark.parametrize(
    ("window", "rows", "spans"),
    [
        # 8 cached tokens on 2 ranks, runs of 2: rank 0 holds 0 1 4 5 and rank 1 holds 2 3 6 7
        (None, 4, [[(0, 4), (0, 4)], [(0, 4), (0, 4)]]),
        # the new tokens are at 8 and 9 and see 5..8 and 6..9: the first round is left out
        (4, 2, [[(1, 2), (2, 2)], [(0, 2), (0, 2)]]),
        (2, 1, [[(1, 1), (1, 1)], [(0, 1), (1, 1)]]),  # 7, and nothing cached
    ],
)
def test_a_worked_window_over_the_parts_of_two_ranks(
    window: int | None, rows: int, spans: list[list[tuple[int, int]]]
) -> None:
    plan, _ = group(Case(2, 2, 4, ((8, 2),)))
    (piece,) = pieces_of(plan, False, BIG, window)
    assert piece.width == rows
    found = [list(zip(s.lo.tolist(), s.hi.tolist(), strict=True)) for s in piece.shards]
    assert [[(lo, max(lo, hi)) for lo, hi in shard] for shard in found] == spans
