"""Cached context in pieces: plans of all ranks against tokens that are dealt one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from cplayers.cache import InterleavedLayout, MLASpec, PagedKVCache, StepPlan
from cplayers.ops import Tile

Key = tuple[int, int]  # sequence, position
BIG = 1 << 30


@dataclass(frozen=True)
class Case:
    """Sequences with (cached, new) tokens, spread over cp x pcp ranks."""

    cp_size: int
    interleave: int
    block: int
    lengths: tuple[tuple[int, int], ...]
    pcp_size: int = 1
    max_decode_tokens: int = 0
    seed: int = 0

    def plans(self) -> list[list[StepPlan]]:
        """By cp rank, then by pcp rank."""
        return [[self._plan(cp, pcp) for pcp in range(self.pcp_size)] for cp in range(self.cp_size)]

    def _plan(self, cp: int, pcp: int) -> StepPlan:
        layout = InterleavedLayout(self.cp_size, self.interleave, self.block)
        blocks = 2 * sum(layout.blocks(cached + new) for cached, new in self.lengths) + 1
        cache = PagedKVCache(
            MLASpec(1, 2), layout, 1, blocks, cp, pcp_rank=pcp, pcp_size=self.pcp_size
        )
        rng = random.Random(self.seed)
        left = {seq: cached for seq, (cached, _) in enumerate(self.lengths)}
        for seq in left:
            cache.add(seq)
        if self.seed % 2:  # leave every other block or so, in no pattern
            taken = cache.pool.allocate(cache.pool.num_blocks)
            cache.pool.release(rng.sample(taken, len(taken) // 2 + 1))
        while any(left.values()):  # seed 0: each sequence at once, in one run of blocks
            seq = rng.choice([seq for seq in left if left[seq]])
            take = rng.randint(1, left[seq]) if self.seed else left[seq]
            cache.commit(cache.plan([(seq, take)]))
            left[seq] -= take
        requests = [(seq, new) for seq, (_, new) in enumerate(self.lengths)]
        return cache.plan(requests, max_decode_tokens=self.max_decode_tokens)

    @property
    def packed(self) -> list[Key]:
        """Each packed new token."""
        return [
            (seq, position)
            for seq, (cached, new) in enumerate(self.lengths)
            for position in range(cached, cached + new)
        ]

    def decodes(self, seq: int) -> bool:
        cached, new = self.lengths[seq]
        return cached > 0 and new <= self.max_decode_tokens

    def context(self, decode: bool) -> list[Key]:
        """Every key that travels: cached tokens, and the new ones of requests that decode."""
        return [
            (seq, position)
            for seq, (cached, new) in enumerate(self.lengths)
            if new and cached and self.decodes(seq) == decode
            for position in range(cached + new * decode)
        ]

    def share(self, keys: list[Key], rank: int) -> int:
        return sum(position // self.interleave % self.cp_size == rank for _, position in keys)

    def stored(self, plan: StepPlan, rank: int) -> dict[int, Key]:
        """Which token each slot of a rank holds once the step's own are written."""
        held: dict[int, Key] = {}
        for row, seq in zip(plan.block_table.tolist(), plan.row_order.tolist(), strict=True):
            local = 0
            for position in range(sum(self.lengths[seq])):
                if position // self.interleave % self.cp_size == rank:
                    held[row[local // self.block] * self.block + local % self.block] = seq, position
                    local += 1
        return held


def pieces_of(plan: StepPlan, decode: bool, workspace: int, window: int | None) -> tuple[Any, ...]:
    if decode:
        return plan.decode_context.pieces(workspace, window)
    return () if plan.prefill is None else plan.prefill.context.pieces(workspace, window)


def seen_by(tiles: tuple[Tile, ...], lo: Tensor, hi: Tensor) -> list[tuple[int, int]]:
    """What the tiles let each row see; rows in no tile see nothing, masked ones what lo, hi say."""
    seen = [(0, 0)] * len(lo)
    for tile in tiles:
        for row in range(tile.row0, tile.row1):
            assert seen[row] == (0, 0)
            if tile.kind == "full":
                seen[row] = tile.lo, tile.hi
            elif tile.kind == "causal":
                seen[row] = tile.lo, tile.hi - (tile.row1 - 1 - row)
            else:
                seen[row] = int(lo[row]), int(hi[row])
    return seen


def gathered_keys(
    case: Case, plans: list[list[StepPlan]], decode: bool, workspace: int, window: int | None
) -> list[list[Key]]:
    """Keys of each piece in the order given, after checks of what every rank contributes."""
    ranks = [pieces_of(row[0], decode, workspace, window) for row in plans]
    widths = [[piece.width for piece in pieces] for pieces in ranks]
    assert all(w == widths[0] for w in widths)
    assert all(0 < case.cp_size * w <= max(workspace, case.cp_size) for w in widths[0])
    stored = [case.stored(row[0], cp) for cp, row in enumerate(plans)]
    keys = []
    for pieces in zip(*ranks, strict=True):
        rows: list[Key | None] = []
        for piece, held in zip(pieces, stored, strict=True):
            part: list[Key | None] = [None] * piece.width
            for slot, length, row in piece.reads:
                assert length > 0 and row + length <= piece.width
                for i in range(length):
                    assert part[row + i] is None, "two keys in one row"
                    part[row + i] = held[slot + i]
            rows += part
        order = pieces[0].order.tolist()
        assert all(piece.order.tolist() == order for piece in pieces)
        assert sorted(order) == [i for i, key in enumerate(rows) if key is not None]
        found = [key for i in order if (key := rows[i]) is not None]
        for seq in {seq for seq, _ in found}:
            positions = [position for s, position in found if s == seq]
            assert all(a < b for a, b in pairwise(positions))
        keys.append(found)
    return keys


def check(case: Case, workspace: int, window: int | None = None) -> list[list[Key]]:
    """All properties of the pieces of a step, of its chunks and of its decode rows.

    Returns the keys of the chunks' pieces.
    """
    plans = case.plans()
    prefill: list[list[Key]] = []
    for decode in (True, False):
        keys = gathered_keys(case, plans, decode, workspace, window)
        union = [key for found in keys for key in found]
        context = case.context(decode)
        assert len(union) == len(set(union)), "a key is counted twice"
        if window is None:
            assert sorted(union) == context
        assert set(union) <= set(context)
        widths = [piece.width for piece in pieces_of(plans[0][0], decode, workspace, window)]
        if window is None:
            assert sum(widths) == case.share(context, 0)
            padding = case.cp_size * sum(widths) - len(context)
            requests = len({seq for seq, _ in context})
            assert 0 <= padding <= (case.cp_size - 1) * case.interleave * requests
            at_a_time = max(1, workspace // case.cp_size)
            assert len(widths) == -(-sum(widths) // at_a_time)  # as few as the workspace allows
        for plan in (plan for row in plans for plan in row):
            check_rows(case, plan, decode, workspace, window, keys)
        if not decode:
            prefill = keys
    return prefill


def check_rows(
    case: Case,
    plan: StepPlan,
    decode: bool,
    workspace: int,
    window: int | None,
    keys: list[list[Key]],
) -> None:
    """Each row of a rank sees its context, every key once over all pieces."""
    packed = case.packed
    rows = [packed[token] for token in plan.tokens.tolist()]
    rows = rows[: plan.num_decode] if decode else rows[plan.num_decode :]
    assert all(case.decodes(seq) == decode for seq, _ in rows)
    pieces = pieces_of(plan, decode, workspace, window)
    assert len(pieces) == len(keys)
    seen: list[list[Key]] = [[] for _ in rows]
    for piece, found in zip(pieces, keys, strict=True):
        assert len(piece.lo) == len(piece.hi) == len(rows)
        tiled = seen_by(piece.tiles, piece.lo, piece.hi)
        for row, (lo, hi) in enumerate(zip(piece.lo.tolist(), piece.hi.tolist(), strict=True)):
            assert 0 <= lo <= len(found) and hi <= len(found)
            assert found[lo:hi] == found[slice(*tiled[row])]
            seen[row] += found[lo:hi]
    for (seq, position), visible in zip(rows, seen, strict=True):
        first = 0 if window is None else max(0, position - window + 1)
        cached, _ = case.lengths[seq]
        last = position if decode else cached - 1
        assert sorted(visible) == [(seq, p) for p in range(first, last + 1)]


# Properties


NEW = st.integers(0, 3) | st.integers(0, 12)
LENGTHS = st.tuples(st.just(0) | st.integers(1, 20) | st.integers(1, 60), NEW)
CASES = st.builds(
    Case,
    cp_size=st.integers(1, 8),
    interleave=st.integers(1, 5) | st.integers(1, 40),
    block=st.integers(1, 6) | st.integers(1, 16),
    lengths=st.lists(LENGTHS, min_size=1, max_size=5).map(tuple),
    pcp_size=st.integers(1, 3),
    max_decode_tokens=st.integers(0, 5),
    seed=st.integers(0, 999),
)
WORKSPACES = st.integers(1, 9) | st.integers(1, 200)


@given(CASES, WORKSPACES, st.none() | st.integers(1, 30))
@example(Case(2, 1, 4, ((13, 3),)), 8, None)
@example(Case(4, 16, 4, ((10, 2), (0, 3), (1, 1))), 1, None)
@example(Case(3, 5, 2, ((33, 4), (7, 2), (12, 9)), 2, 2, 7), 10, None)
@example(Case(2, 3, 2, ((33, 4), (7, 2), (12, 9)), 2, 2, 7), 5, 6)
def test_the_pieces_of_all_ranks_are_the_context_once(
    case: Case, workspace: int, window: int | None
) -> None:
    check(case, workspace, window)


CONTEXTS = {
    "13": (13,),
    "960 and seven of 16": (960, *[16] * 7),
    "2048 and 320": (2048, 320),
    "37, 1000, 5": (37, 1000, 5),
    "4, none, 2": (4, 0, 2),
    "1": (1,),
}


@pytest.mark.parametrize("cp_size", [1, 2, 4, 8])
@pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=CONTEXTS)
def test_contexts_of_unequal_length(contexts: tuple[int, ...], cp_size: int) -> None:
    lengths = tuple((cached, 2 + i % 2) for i, cached in enumerate(contexts))
    workspaces = (1024, 7) if sum(contexts) > 100 else (1024, 1, 2, 7)
    for interleave, block in ((1, 4), (3, 16), (16, 4), (40, 16)):
        for workspace in workspaces:
            case = Case(cp_size, interleave, block, lengths, max_decode_tokens=2, seed=interleave)
            check(case, workspace)


# Named cases, with numbers worked by hand


def piece_rows(case: Case, workspace: int) -> list[list[int]]:
    """By rank, how many keys it contributes to each piece."""
    return [
        [
            sum(length for _, length, _ in piece.reads)
            for piece in pieces_of(row[0], False, workspace, None)
        ]
        for row in case.plans()
    ]


def test_13_tokens_in_pieces_of_4_rows() -> None:
    """vLLM 28476 and 28411: N 2, I 1; the last piece of a rank ends where its share does."""
    case = Case(2, 1, 4, ((13, 3),))
    assert piece_rows(case, 8) == [[4, 3], [4, 2]]
    assert piece_rows(case, 4) == [[2, 2, 2, 1], [2, 2, 2, 0]]
    for workspace in (8, 4):
        assert sum(map(sum, piece_rows(case, workspace))) == 13
    assert check(case, 8) == [[(0, p) for p in range(8)], [(0, p) for p in range(8, 13)]]
    first = case.plans()[0][0].prefill
    assert first is not None
    one, two = first.context.pieces(8)
    assert (one.width, two.width) == (4, 3)
    assert one.order.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert two.order.tolist() == [0, 3, 1, 4, 2]
    assert [(t.lo.tolist(), t.hi.tolist()) for t in (one, two)] == [
        ([0, 0, 0], [8, 8, 8]),
        ([0, 0, 0], [5, 5, 5]),
    ]


def test_order_where_runs_are_longer_than_a_piece() -> None:
    """N 2, I 3, 8 tokens: rank 0 holds 0 1 2 6 7 and rank 1 holds 3 4 5; 2 rows of each at once."""
    case = Case(2, 3, 4, ((8, 1),))
    pieces = pieces_of(case.plans()[1][0], False, 4, None)
    assert [piece.width for piece in pieces] == [2, 2, 1]
    assert [piece.order.tolist() for piece in pieces] == [[0, 1, 2, 3], [0, 2, 1], [0]]
    assert check(case, 4) == [
        [(0, 0), (0, 1), (0, 3), (0, 4)],
        [(0, 2), (0, 5), (0, 6)],
        [(0, 7)],
    ]


@pytest.mark.parametrize("requests", [3, 5, 6, 7, 9])
@pytest.mark.parametrize("interleave", [1, 3, 16])
def test_any_number_of_requests_shares_the_workspace(requests: int, interleave: int) -> None:
    """vLLM 41229: N 8; no piece is empty, none exceeds the workspace, nothing is asserted."""
    case = Case(8, interleave, 16, tuple((50 + 7 * i, 1 + i % 2) for i in range(requests)))
    for workspace in (1024, 128, 100, 8, 3):
        keys = check(case, workspace)
        assert all(keys)
        assert len(keys) > 1 or workspace == 1024


def test_a_context_on_one_rank_alone_is_gathered_by_all() -> None:
    """vLLM, skip of empty context: N 4, I 16, context 10; ranks 1 to 3 hold nothing of it."""
    case = Case(4, 16, 16, ((10, 3),))
    assert piece_rows(case, 1024) == [[10], [0], [0], [0]]
    assert check(case, 1024) == [[(0, p) for p in range(10)]]
    assert len(check(case, 8)) == 5


def test_a_chunk_of_7_tokens_has_7_slots() -> None:
    """LMCache 1732: N 2, 7 tokens, -1 where not owned; as a chunk, and as decode rows."""
    for max_decode_tokens in (0, 16):
        plans = Case(2, 1, 4, ((4, 7),), max_decode_tokens=max_decode_tokens).plans()
        slots = [row[0].slot_mapping.tolist() for row in plans]
        assert [[slot >= 0 for slot in s] for s in slots] == [
            [True, False, True, False, True, False, True],
            [False, True, False, True, False, True, False],
        ]
        # positions 4..10 of 4, 6, 8, 10 at rank 0 and 5, 7, 9 at rank 1: local indices 2..5, 2..4
        assert [[slot for slot in s if slot >= 0] for s in slots] == [[2, 3, 4, 5], [2, 3, 4]]


def test_a_request_without_context_or_without_new_tokens_takes_no_part() -> None:
    case = Case(2, 1, 4, ((4, 3), (0, 5), (6, 0), (2, 2)))
    assert check(case, BIG) == [[(0, 0), (0, 1), (0, 2), (0, 3), (3, 0), (3, 1)]]
    plans = Case(2, 1, 4, ((0, 5), (6, 0))).plans()
    assert [pieces_of(row[0], False, 8, None) for row in plans] == [(), ()]


@pytest.mark.parametrize(
    ("new", "max_decode_tokens", "decodes"),
    [(1, 0, False), (1, 1, True), (2, 1, False), (16, 16, True), (17, 16, False)],
)
def test_few_new_tokens_decode_and_many_are_a_chunk(
    new: int, max_decode_tokens: int, decodes: bool
) -> None:
    plan = Case(2, 1, 4, ((5, new),), 2, max_decode_tokens).plans()[0][0]
    assert plan.num_decode == (new if decodes else 0)
    assert (plan.prefill is None) == decodes
    assert bool(plan.decode_context.pieces(8)) == decodes


def test_pieces_are_computed_once_per_step() -> None:
    plan = Case(2, 1, 4, ((13, 3), (5, 1)), max_decode_tokens=1).plans()[0][0]
    for decode in (True, False):
        assert pieces_of(plan, decode, 4, None) is pieces_of(plan, decode, 4, None)
        assert len(pieces_of(plan, decode, 4, None)) > len(pieces_of(plan, decode, BIG, None)) == 1
