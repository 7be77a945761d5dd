"""Properties of layouts against an oracle that deals the tokens one by one."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from cplayers.cache import InterleavedLayout, Layout, ZigzagLayout
from cplayers.ops import spans

SIZES = st.integers(1, 9)
LENGTHS = st.integers(0, 200)
LAYOUTS = st.builds(InterleavedLayout, SIZES, SIZES, st.integers(1, 17))


def deal(ranks: int, run: int, length: int) -> list[list[int]]:
    """Positions of each rank: ``run`` tokens to the first, then to the second, and so on."""
    held: list[list[int]] = [[] for _ in range(ranks)]
    turn = left = 0
    for position in range(length):
        if left == 0:
            turn, left = (turn + 1 if position else 0), run
        held[turn % ranks].append(position)
        left -= 1
    return held


def cut(ranks: int, length: int) -> list[list[int]]:
    """Positions of each rank: chunks r and 2 * ranks - 1 - r of equally long ones."""
    chunk = -(-length // (2 * ranks))
    chunks = [
        list(range(length))[i * chunk : (i + 1) * chunk] if chunk else [] for i in range(2 * ranks)
    ]
    return [chunks[rank] + chunks[2 * ranks - 1 - rank] for rank in range(ranks)]


def check(layout: Layout, held: list[list[int]], length: int) -> None:
    assert len(held) == layout.cp_size
    pos = torch.arange(length)
    owners, locals_ = layout.owner(pos).tolist(), layout.local_index(pos).tolist()
    seen = 0
    for rank, positions in enumerate(held):
        assert layout.positions(rank, length).tolist() == positions
        assert positions == sorted(positions)
        for index, position in enumerate(positions):
            assert (owners[position], locals_[position]) == (rank, index)
            assert (layout.owner(position), layout.local_index(position)) == (rank, index)
            seen += 1
        before = [sum(p < n for p in positions) for n in range(length + 1)]
        assert [layout.count_before(n, rank) for n in range(length + 1)] == before
        assert layout.count_before(torch.arange(length + 1), rank).tolist() == before
    assert seen == length


@given(LAYOUTS, LENGTHS)
def test_interleaving_deals_the_tokens_in_turn(layout: InterleavedLayout, length: int) -> None:
    check(layout, deal(layout.cp_size, layout.interleave_size, length), length)


@given(SIZES, LENGTHS)
@example(ranks=8, length=5)
@example(ranks=2, length=9)
def test_zigzag_deals_mirrored_chunks(ranks: int, length: int) -> None:
    zigzag, held = ZigzagLayout(ranks, length), cut(ranks, length)
    check(zigzag, held, length)
    gathered = torch.tensor([p for positions in held for p in positions], dtype=torch.long)
    assert gathered[zigzag.restore()].tolist() == list(range(length))


@given(SIZES, st.integers(1, 20))
def test_zigzag_balances_causal_work_where_it_divides_the_length(ranks: int, chunk: int) -> None:
    zigzag = ZigzagLayout(ranks, 2 * ranks * chunk)
    pairs = zigzag.length * (zigzag.length + 1) // 2
    assert [zigzag.causal_work(rank) for rank in range(ranks)] == [pairs // ranks] * ranks


@given(SIZES, LENGTHS)
def test_causal_work_of_the_ranks_is_that_of_the_prompt(ranks: int, length: int) -> None:
    zigzag = ZigzagLayout(ranks, length)
    assert sum(map(zigzag.causal_work, range(ranks))) == length * (length + 1) // 2


@given(LAYOUTS, LENGTHS, st.integers(0, 999))
def test_every_token_has_one_slot_of_its_own(
    layout: InterleavedLayout, length: int, seed: int
) -> None:
    blocks = layout.blocks(length)
    table = torch.randperm(2 * blocks + 1, generator=torch.Generator().manual_seed(seed))[:blocks]
    pos = torch.arange(length)
    slots = torch.stack([layout.slots(pos, table, rank) for rank in range(layout.cp_size)])
    assert ((slots >= 0).sum(0) == 1).all()
    for row in slots:
        used = row[row >= 0].tolist()
        assert len(set(used)) == len(used)
        assert {slot // layout.block_size for slot in used} <= set(table.tolist())


@given(LAYOUTS, LENGTHS)
def test_a_dividing_interleave_is_the_virtual_block_rule(
    layout: InterleavedLayout, length: int
) -> None:
    ranks, run = layout.cp_size, layout.interleave_size
    layout = InterleavedLayout(ranks, run, run * layout.block_size)
    virtual = layout.block_size * ranks
    table = torch.arange(layout.blocks(length)).flip(0) * 3
    for rank in range(ranks):
        expected = []
        for position in range(length):
            block, offset = divmod(position, virtual)
            own = offset // run % ranks == rank
            inside = offset // (run * ranks) * run + offset % run
            expected.append(int(table[block]) * layout.block_size + inside if own else -1)
        assert layout.slots(torch.arange(length), table, rank).tolist() == expected


@given(LAYOUTS, st.integers(1, 200), st.integers(1, 200), st.none() | st.integers(1, 40))
@example(InterleavedLayout(4, 1, 4), 16, 16, 4)
def test_spans_are_what_a_causal_query_sees(
    layout: InterleavedLayout, length: int, queries: int, window: int | None
) -> None:
    rows = torch.arange(max(0, length - queries), length)
    held = deal(layout.cp_size, layout.interleave_size, length)
    for rank, positions in enumerate(held):
        lo, hi = spans(rows, lambda n, r=rank: layout.count_before(n, r), window)
        for row, low, high in zip(rows.tolist(), lo.tolist(), hi.tolist(), strict=True):
            first = 0 if window is None else row - window + 1
            assert positions[low:high] == [p for p in positions if first <= p <= row]


@given(LAYOUTS, st.integers(1, 300))
def test_blocks_waste_less_than_one_per_rank(layout: InterleavedLayout, length: int) -> None:
    shares = [layout.count_before(length, rank) for rank in range(layout.cp_size)]
    reserved = layout.blocks(length) * layout.block_size
    assert max(shares) <= reserved < max(shares) + layout.block_size
    assert layout.full_blocks(length) == min(shares) // layout.block_size
    held, full = layout.blocks(length), layout.full_blocks(length)
    assert layout.blocks(layout.room(held)) == held < layout.blocks(layout.room(held) + 1)
    assert length <= layout.room(held)
    assert layout.filled(full) <= length < layout.filled(full + 1)
    if layout.block_size % layout.interleave_size == 0:
        assert reserved <= -(-length // layout.cp_size) + layout.block_size


@given(SIZES, SIZES, st.integers(1, 300))
def test_with_interleave_as_large_as_a_block_one_block_is_part_filled(
    ranks: int, size: int, length: int
) -> None:
    layout = InterleavedLayout(ranks, size, size)
    partial = [layout.count_before(length, rank) % size > 0 for rank in range(ranks)]
    assert sum(partial) <= 1
    assert any(partial) == (length % size > 0)
