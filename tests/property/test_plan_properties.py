"""A step's plans on all ranks against a simulation that deals and looks at tokens one by one."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from cplayers.cache import GQASpec, InterleavedLayout, PagedKVCache, StepPlan
from cplayers.ops import PagedKeys, Tile

SMALL = st.integers(1, 5)


@dataclass(frozen=True)
class Step:
    """Sequences with (cached, new) tokens, spread over cp x pcp ranks."""

    cp_size: int
    pcp_size: int
    interleave: int
    block: int
    lengths: tuple[tuple[int, int], ...]
    seed: int
    most: int = 16  # new tokens of a sequence that decodes

    def plan(self, cache: PagedKVCache) -> StepPlan:
        return cache.plan(self.requests, max_decode_tokens=self.most)

    def decodes(self, seq: int) -> bool:
        cached, new = self.lengths[seq]
        return cached > 0 and new <= self.most

    def caches(self) -> list[list[PagedKVCache]]:
        """By cp rank, then by pcp rank; the cached tokens are there, in scattered blocks."""
        layout = InterleavedLayout(self.cp_size, self.interleave, self.block)
        blocks = 2 * sum(layout.blocks(cached + new) for cached, new in self.lengths) + 1
        return [
            [
                self._fill(
                    PagedKVCache(
                        GQASpec(1, 1), layout, 1, blocks, cp, pcp_rank=pcp, pcp_size=self.pcp_size
                    )
                )
                for pcp in range(self.pcp_size)
            ]
            for cp in range(self.cp_size)
        ]

    def _fill(self, cache: PagedKVCache) -> PagedKVCache:
        rng = random.Random(self.seed)
        left = {seq: cached for seq, (cached, _) in enumerate(self.lengths)}
        for seq in left:
            cache.add(seq)
        if self.seed % 2:  # leave every other block or so, in no pattern
            taken = cache.pool.allocate(cache.pool.num_blocks)
            cache.pool.release(rng.sample(taken, len(taken) // 2))
        while any(left.values()):
            seq = rng.choice([seq for seq in left if left[seq]])
            take = rng.randint(1, min(left[seq], 2 * self.block * self.cp_size))
            cache.commit(cache.plan([(seq, take)]))
            left[seq] -= take
        return cache

    @property
    def requests(self) -> list[tuple[int, int]]:
        return [(seq, new) for seq, (_, new) in enumerate(self.lengths)]

    @property
    def packed(self) -> list[tuple[int, int]]:
        """(sequence, position) of each packed new token."""
        return [
            (seq, position)
            for seq, (cached, new) in enumerate(self.lengths)
            for position in range(cached, cached + new)
        ]

    def slot(self, table: tuple[int, ...], position: int, rank: int) -> int | None:
        """Slot of a position on a rank, by dealing all positions before it; None if not its own."""
        held = [p for p in range(position + 1) if p // self.interleave % self.cp_size == rank]
        if not held or held[-1] != position:
            return None
        local = len(held) - 1
        return table[local // self.block] * self.block + local % self.block


LENGTHS = st.tuples(st.just(0) | st.integers(1, 40), st.integers(0, 6) | st.integers(0, 30))
STEPS = st.builds(
    Step,
    cp_size=SMALL,
    pcp_size=st.integers(1, 4),
    interleave=SMALL,
    block=SMALL,
    lengths=st.lists(LENGTHS, min_size=1, max_size=5).map(tuple),
    seed=st.integers(0, 999),
    most=st.integers(0, 30),
)
MIXED = Step(2, 1, 1, 4, ((5, 1), (6, 1), (0, 7)), 0)
EMPTY_BETWEEN = Step(2, 2, 2, 2, ((0, 2), (0, 0), (3, 0), (0, 2)), 0)
NO_DIVISOR = Step(4, 4, 3, 4, ((0, 7), (0, 7), (0, 18)), 0)
SHORT_PROMPTS = Step(4, 4, 1, 2, ((0, 1), (0, 2), (0, 3), (0, 30)), 0)
NOTHING_NEW = Step(1, 1, 1, 4, ((10, 0), (6, 2), (9, 0), (3, 1)), 0)
SCATTERED = Step(2, 1, 5, 1, ((40, 4), (33, 1), (0, 3)), 7)
CHUNKS = Step(2, 2, 3, 4, ((40, 7), (33, 1), (0, 3), (5, 20), (8, 2)), 3, 2)
WHOLE_CHUNKS = Step(2, 1, 3, 4, ((40, 7), (33, 1), (0, 3), (5, 20), (8, 2)), 3, 2)


def spans_of(tiles: tuple[Tile, ...], lo: Tensor, hi: Tensor) -> list[tuple[int, int]]:
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


def rows_of(plan: StepPlan, packed: list[tuple[int, int]]) -> list[tuple[int, int]]:
    return [packed[token] for token in plan.tokens.tolist()]


@given(STEPS)
@example(MIXED)
@example(EMPTY_BETWEEN)
@example(NO_DIVISOR)
@example(SHORT_PROMPTS)
@example(CHUNKS)
def test_the_rows_of_the_ranks_are_each_token_once(step: Step) -> None:
    packed = step.packed
    plans = [step.plan(cache) for cache in step.caches()[0]]
    decode = [t for t, (seq, _) in enumerate(packed) if step.decodes(seq)]
    shares = []
    for plan in plans:
        tokens = plan.tokens.tolist()
        assert tokens[: plan.num_decode] == decode
        assert plan.is_decode.tolist() == [t in decode for t in tokens]
        assert [packed[t][1] for t in tokens] == plan.positions.tolist()
        shares.append(tokens[plan.num_decode :])
        assert (plan.num_tokens, plan.num_rows) == (len(packed), len(tokens))
        bounds, rows = plan.cu_seqlens_q.tolist(), rows_of(plan, packed)
        assert sorted(plan.row_order.tolist()) == list(range(len(step.lengths)))
        for i, seq in enumerate(plan.row_order.tolist()):
            assert {s for s, _ in rows[bounds[i] : bounds[i + 1]]} <= {seq}
        assert bounds[-1] == len(rows)
        assert [packed[t] for t in plan.last.tolist()] == [
            (seq, cached + new - 1) for seq, (cached, new) in enumerate(step.lengths) if new
        ]
        if plan.prefill is None:
            assert len(decode) == len(packed)
    assert sorted(t for share in shares for t in share) == sorted(
        set(range(len(packed))) - set(decode)
    )
    for token in range(len(packed)):
        for plan in plans:
            owner, index = int(plan.owner[token]), int(plan.index[token])
            assert int(plans[owner].tokens[index]) == token
            assert owner == 0 or token not in decode


@given(STEPS, st.none() | st.integers(1, 9))
@example(EMPTY_BETWEEN, None)
@example(NO_DIVISOR, 4)
@example(SHORT_PROMPTS, None)
@example(CHUNKS, 3)
def test_prefill_rows_see_exactly_their_causal_new_keys(step: Step, window: int | None) -> None:
    packed = step.packed
    plans = [step.plan(cache) for cache in step.caches()[0]]
    pieces = [rows_of(plan, packed)[plan.num_decode :] for plan in plans]
    for plan, own in zip(plans, pieces, strict=True):
        if plan.prefill is None:
            assert not any(pieces)
            continue
        assert plan.prefill.counts == tuple(map(len, pieces))
        assert plan.prefill.width == max(map(len, pieces)) > 0
        if window is None:
            assert plan.prefill.shards is plan.prefill.shards_of(None)
        shards = plan.prefill.shards_of(window)
        assert len(shards) == len(pieces)
        for shard, piece in zip(shards, pieces, strict=True):
            pairs = list(zip(shard.lo.tolist(), shard.hi.tolist(), strict=True))
            assert len(pairs) == len(own)
            seen = spans_of(shard.tiles, shard.lo, shard.hi)
            for (seq, position), (lo, hi), tile in zip(own, pairs, seen, strict=True):
                first = 0 if window is None else position - window + 1
                expected = [(s, p) for s, p in piece if s == seq and first <= p <= position]
                assert piece[lo:hi] == expected
                assert piece[tile[0] : tile[1]] == expected


@given(STEPS)
@example(MIXED)
@example(EMPTY_BETWEEN)
@example(SHORT_PROMPTS)
@example(SCATTERED)
@example(CHUNKS)
def test_each_token_is_written_once_and_where_its_position_says(step: Step) -> None:
    packed = step.packed
    caches = step.caches()
    written: dict[tuple[int, int], int] = {}
    for cp, row in enumerate(caches):
        plans = [step.plan(cache) for cache in row]
        keys: list[tuple[int, int] | None] = [*rows_of(plans[0], packed)[: plans[0].num_decode]]
        for plan in plans:
            if plan.prefill is not None:
                piece = rows_of(plan, packed)[plan.num_decode :]
                keys += piece + [None] * (plan.prefill.width - len(piece))
        for cache, plan in zip(row, plans, strict=True):
            slots = plan.slot_mapping.tolist()
            assert len(slots) == len(keys)
            parts = [plan.decode_writes, *plan.prefill_writes]
            offsets = [0] + [
                plan.num_decode + i * plan.prefill.width
                for i in range(step.pcp_size if plan.prefill else 0)
                if plan.prefill
            ]
            copied = {}
            for writes, offset in zip(parts, offsets, strict=True):
                for row0, row1, slot in writes.segments:
                    copied |= {offset + r: slot + r - row0 for r in range(row0, row1)}
                if writes.rows is not None and writes.slots is not None:
                    pairs = zip(writes.rows.tolist(), writes.slots.tolist(), strict=True)
                    copied |= {offset + r: slot for r, slot in pairs}
            assert copied == {row: slot for row, slot in enumerate(slots) if slot >= 0}
            cache.commit(plan)
            tables = [cache.block_table(seq) for seq, _ in step.requests]
            table = plan.block_table.tolist()
            for i, seq in enumerate(plan.row_order.tolist()):
                padding = [-1] * (len(table[i]) - len(tables[seq]))
                assert table[i] == [*tables[seq], *padding]
            for key, slot in zip(keys, slots, strict=True):
                expected = None if key is None else step.slot(tables[key[0]], key[1], cp)
                assert (slot if slot >= 0 else None) == expected
        for key, slot in zip(keys, slots, strict=True):
            if key is not None and slot >= 0:
                assert key not in written, "two ranks of the group own it"
                written[key] = slot
        assert len({s for s in slots if s >= 0}) == sum(s >= 0 for s in slots)
    assert sorted(written) == sorted(packed)


@given(STEPS, st.none() | st.integers(1, 12))
@example(MIXED, None)
@example(NOTHING_NEW, None)
@example(NOTHING_NEW, 3)
@example(SCATTERED, None)
@example(SCATTERED, 6)
@example(WHOLE_CHUNKS, None)
@example(WHOLE_CHUNKS, 6)
def test_reads_are_the_causal_keys_in_any_block_table(step: Step, window: int | None) -> None:
    packed = step.packed
    for cp, row in enumerate(step.caches()):
        cache = row[-1]
        plan = step.plan(cache)
        cache.commit(plan)
        rows = rows_of(plan, packed)
        chunks = [(seq, position) for seq, position in packed if not step.decodes(seq)]
        parts = [(rows[: plan.num_decode], plan.reads(window))]
        if plan.prefill is not None:
            parts.append((chunks, plan.prefill.reads(window)))
        for queries, reads in parts:
            seen: list[list[int]] = [[] for _ in queries]
            for read in reads:
                assert read.tiles
                assert int(read.hi.max()) <= read.length
                spans = spans_of(read.tiles, read.lo, read.hi)
                for i, (lo, hi) in enumerate(zip(read.lo.tolist(), read.hi.tolist(), strict=True)):
                    slots = read.slots(cache.layout.block_size).tolist()
                    assert len(slots) == read.length and slots[0] == read.slot
                    assert slots[lo:hi] == slots[spans[i][0] : spans[i][1]]
                    seen[read.row0 + i] += slots[lo:hi]
            for (seq, position), found in zip(queries, seen, strict=True):
                table = cache.block_table(seq)
                first = 0 if window is None else max(0, position - window + 1)
                slots = [step.slot(table, p, cp) for p in range(first, position + 1)]
                assert found == [slot for slot in slots if slot is not None]
        assert plan.reads(window) is plan.reads(window)
        check_paged(step, cache, rows[: plan.num_decode], cp, plan.paged(window), window)
        if plan.prefill is not None:
            check_paged(step, cache, chunks, cp, plan.prefill.paged(window), window)
        for i, (seq, position) in enumerate(rows):
            table = cache.block_table(seq)
            slots = [step.slot(table, p, cp) for p in range(position + 1)]
            own = [slot for slot in slots if slot is not None]
            assert (int(plan.spans.lo[i]), int(plan.spans.hi[i])) == (0, len(own))


def check_paged(
    step: Step,
    cache: PagedKVCache,
    queries: Sequence[tuple[int, int]],
    cp: int,
    keys: PagedKeys,
    window: int | None,
) -> None:
    """Block table, request, lo and hi lead to the causal keys that this rank owns."""
    for i, (seq, position) in enumerate(queries):
        table = cache.block_table(seq)
        first = 0 if window is None else max(0, position - window + 1)
        wanted = [step.slot(table, p, cp) for p in range(first, position + 1)]
        blocks, size = keys.block_table[keys.request[i]].tolist(), keys.block_size
        spans = range(int(keys.lo[i]), int(keys.hi[i]))
        found = [blocks[key // size] * size + key % size for key in spans]
        assert found == [slot for slot in wanted if slot is not None]
    counts = Counter(seq for seq, _ in queries)
    assert keys.most_rows == max(counts.values(), default=0)


def test_the_example_is_scattered_indeed() -> None:
    cache = SCATTERED.caches()[0][0]
    (read,) = cache.plan([(0, 1)]).reads()
    assert read.blocks is not None and int((read.blocks.diff() != 1).sum()) > 5
