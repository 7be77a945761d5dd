"""Plans of single steps, worked by hand; cases from the field among them, named as such."""

from __future__ import annotations

import pytest
import torch

from cplayers.cache import GQASpec, InterleavedLayout, PagedKVCache, StepPlan
from cplayers.cache.view import SEGMENTS_MAX, Writes
from cplayers.ops import Tile

CPU = torch.device("cpu")


def cache_with(
    cached: list[int],
    *,
    ranks: int = 2,
    interleave: int = 1,
    block: int = 4,
    rank: int = 0,
    pcp: tuple[int, int] = (0, 1),
) -> PagedKVCache:
    """Sequences 0, 1, ... of the given lengths on one rank; ``pcp`` is (rank, size)."""
    layout = InterleavedLayout(ranks, interleave, block)
    cache = PagedKVCache(
        GQASpec(1, 1), layout, 1, 64, rank, torch.float64, pcp_rank=pcp[0], pcp_size=pcp[1]
    )
    for seq, length in enumerate(cached):
        cache.add(seq)
        cache.commit(cache.plan([(seq, length)]))
    return cache


def hi(plan: StepPlan) -> list[int]:
    return plan.spans.hi.tolist()


def test_the_worked_example_of_the_group_of_two() -> None:
    """13 tokens on 2 ranks, block 4, interleave 2: rank 0 writes position 12 at local index 6."""
    for rank, keys, slot in ((0, 7, 6), (1, 6, -1)):
        cache = cache_with([12], interleave=2, rank=rank)
        assert cache.block_table(0) == (0, 1)
        plan = cache.plan([(0, 1)])
        assert plan.slot_mapping.tolist() == [slot]
        assert (plan.spans.lo.tolist(), hi(plan)) == ([0], [keys])
        (read,) = plan.reads()
        assert (read.row0, read.row1, read.slot, read.length) == (0, 1, 0, keys)
        assert read.tiles == (Tile(0, 1, 0, keys, "full"),)


@pytest.mark.parametrize(("rank", "keys"), [(0, [2, 2, 3, 3]), (1, [1, 2, 2, 3])])
def test_vllm_ascend_11492_11849_several_new_tokens_over_a_sharded_cache(
    rank: int, keys: list[int]
) -> None:
    plan = cache_with([2], rank=rank).plan([(0, 4)])
    assert hi(plan) == keys
    assert plan.is_decode.tolist() == [True] * 4
    (read,) = plan.reads()
    assert (read.length, read.hi.tolist()) == (3, keys)


def test_vllm_ascend_6491_offsets_are_per_request() -> None:
    plan = cache_with([5, 6, 7]).plan([(0, 1), (1, 3), (2, 2)])
    assert plan.cu_seqlens_q.tolist() == [0, 1, 4, 6]
    assert plan.positions.tolist() == [5, 6, 7, 8, 7, 8]
    assert plan.last.tolist() == [0, 3, 5]


@pytest.mark.parametrize("pcp_rank", [0, 1])
def test_vllm_ascend_5647_padding_of_a_smaller_step_touches_nobody(pcp_rank: int) -> None:
    cache = cache_with([], ranks=1, pcp=(pcp_rank, 2))
    cache.add("a")
    plan = cache.plan([("a", 8)])
    assert plan.slot_mapping.tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    gathered = torch.tensor([0.0, 1, 6, 7, 2, 3, 4, 5]).double().view(2, 4, 1, 1)
    for writes, rows in zip(plan.prefill_writes, gathered, strict=True):
        cache.write(plan, 0, writes, rows, rows)
    cache.commit(plan)
    cache.add("b")
    plan = cache.plan([("b", 3)])
    (base,) = plan.block_table[0].tolist()
    # Rank 0 has position 0, rank 1 positions 1 and 2: the former is padded to two rows.
    assert plan.slot_mapping.tolist() == [base * 4, -1, base * 4 + 1, base * 4 + 2]
    gathered = torch.tensor([100.0, 999, 101, 102]).double().view(2, 2, 1, 1)
    for writes, rows in zip(plan.prefill_writes, gathered, strict=True):
        cache.write(plan, 0, writes, rows, rows)
    cache.commit(plan)
    keys, _ = cache.view(0, 0, 64 * 4)
    expected = torch.zeros(64 * 4, dtype=torch.float64)
    expected[:8] = torch.arange(8)
    expected[base * 4 : base * 4 + 3] = torch.tensor([100.0, 101, 102])
    assert torch.equal(keys.flatten(), expected)


@pytest.mark.parametrize("cached", [(0, 0, 0), (5, 5, 5), (0, 5, 0)])
def test_vllm_ascend_11807_an_empty_request_in_the_middle_shifts_nobody(
    cached: tuple[int, int, int],
) -> None:
    cache = cache_with(list(cached))
    plan = cache.plan([(0, 2), (1, 0), (2, 2)])
    starts = dict(zip(plan.row_order.tolist(), plan.cu_seqlens_q.tolist(), strict=False))
    ends = dict(zip(plan.row_order.tolist(), plan.cu_seqlens_q[1:].tolist(), strict=True))
    assert {seq: (starts[seq], ends[seq]) for seq in (0, 2)} == {0: (0, 2), 2: (2, 4)}
    assert starts[1] == ends[1]
    assert plan.tokens.tolist() == [0, 1, 2, 3]
    assert plan.last.tolist() == [1, 3]
    cache.commit(plan)
    assert [cache.length(seq) for seq in range(3)] == [cached[0] + 2, cached[1], cached[2] + 2]


@pytest.mark.parametrize(
    ("rank", "slots"), [(0, [0, -1, 1, -1, 2, -1, 3]), (1, [-1, 0, -1, 1, -1, 2, -1])]
)
def test_lmcache_1732_every_token_has_a_slot_entry(rank: int, slots: list[int]) -> None:
    cache = cache_with([], rank=rank)
    cache.add(0)
    assert cache.plan([(0, 7)]).slot_mapping.tolist() == slots


@pytest.mark.parametrize("rank", [0, 1])
def test_vllm_31166_a_dry_run_has_one_length_per_request(rank: int) -> None:
    cache = cache_with([], rank=rank)
    for seq in range(4):
        cache.add(seq)
    dry = cache.plan([(seq, 1) for seq in range(4)])
    assert hi(dry) == [1 - rank] * 4
    assert dry.cu_seqlens_q.tolist() == [0, 1, 2, 3, 4]
    cache.commit(dry)
    dry = cache.plan([(seq, 1) for seq in range(4)])
    assert hi(dry) == [1] * 4
    assert dry.block_table.shape == (4, 1)
    assert cache.length(0) == 1


def test_ring_flash_attention_51_no_length_has_to_divide_anything() -> None:
    plans = []
    for rank in range(4):
        cache = cache_with([], pcp=(rank, 4))
        for seq in range(3):
            cache.add(seq)
        plans.append(cache.plan([(0, 7), (1, 7), (2, 18)]))
    assert plans[0].prefill is not None
    # 7 tokens are 8 chunks of 1, the last one empty; 18 are 6 chunks of 3 and 2 empty ones.
    assert plans[0].prefill.counts == (1 + 1 + 3, 2 + 2 + 3, 2 + 2 + 6, 2 + 2 + 6)
    assert sorted(t for plan in plans for t in plan.tokens.tolist()) == list(range(32))


@pytest.mark.parametrize("length", [1, 2, 3, 30])
def test_prompts_shorter_than_the_group_leave_ranks_without_rows(length: int) -> None:
    rows = []
    for rank in range(4):
        cache = cache_with([], pcp=(rank, 4))
        cache.add(0)
        plan = cache.plan([(0, length)])
        assert plan.prefill is not None, "alike on all ranks, also where there is no row"
        assert [len(shard.lo) for shard in plan.prefill.shards] == [plan.num_rows] * 4
        rows.append(plan.num_rows)
    assert sum(rows) == length
    assert (0 in rows) == (length < 4)


def test_prime_rl_2828_a_window_reaches_only_the_shards_that_hold_it() -> None:
    """Window 4, 16 tokens, 4 ranks: the last query sees positions 12..15."""
    for rank in range(4):
        plan = cache_with([15], ranks=4, interleave=4, rank=rank).plan([(0, 1)])
        reads = plan.reads(window=4)
        if rank < 3:
            assert reads == ()
            assert len(plan.reads()) == 1
        else:
            assert [(read.lo.tolist(), read.hi.tolist()) for read in reads] == [([0], [4])]
    for rank in range(4):
        cache = cache_with([], pcp=(rank, 4))
        cache.add(0)
        plan = cache.plan([(0, 16)])
        assert plan.prefill is not None
        # Chunks of 2: rank r holds chunks r and 7 - r, and reaches one and a half chunks back.
        reached = [source for source, s in enumerate(plan.prefill.shards_of(4)) if s.tiles]
        assert reached == {0: [0, 1, 2], 1: [0, 1, 2, 3], 2: [0, 1, 2, 3], 3: [1, 2, 3]}[rank]


def test_vllm_42674_48456_decodes_and_a_prompt_share_a_step() -> None:
    plan = cache_with([5, 3, 0]).plan([(2, 7), (0, 1), (1, 1)])
    assert plan.row_order.tolist() == [1, 2, 0]
    assert plan.num_decode == 2
    assert plan.tokens.tolist() == [7, 8, 0, 1, 2, 3, 4, 5, 6]
    assert plan.positions.tolist() == [5, 3, 0, 1, 2, 3, 4, 5, 6]
    assert plan.index.tolist() == [2, 3, 4, 5, 6, 7, 8, 0, 1]
    assert plan.owner.tolist() == [0] * 9
    assert (plan.seqs, plan.cached, plan.new) == ((2, 0, 1), (0, 5, 3), (7, 1, 1))


def test_a_step_of_nothing_is_a_plan() -> None:
    cache = cache_with([5])
    for requests in ([], [(0, 0)]):
        plan = cache.plan(requests)
        assert (plan.num_rows, plan.num_tokens, plan.num_decode) == (0, 0, 0)
        assert plan.prefill is None
        assert plan.reads() == ()
        assert plan.last.tolist() == plan.slot_mapping.tolist() == []
        assert plan.cu_seqlens_q.tolist() == [0] * (len(requests) + 1)
        cache.commit(plan)
    assert cache.length(0) == 5


def test_a_block_table_stays_that_of_its_step() -> None:
    cache = cache_with([8, 8], ranks=1)
    plan = cache.plan([(0, 9), (1, 1)])
    cache.commit(plan)
    before = [cache.block_table(0), cache.block_table(1)]
    other = cache.plan([(0, 20)])
    cache.commit(other)
    cache.truncate(1, 2)
    cache.fork(0, "fork")
    cache.truncate(0, 1)
    assert plan.block_table.tolist() == [list(before[0]), [*before[1], -1, -1]]
    assert [read.length for read in plan.reads()] == [17, 9]
    assert other.block_table.tolist() == [list(cache.block_table("fork"))]


def test_a_plan_costs_nothing_per_token_of_context() -> None:
    """What a decode plan looks at is the end of the block table, however long it is."""
    layout = InterleavedLayout(1, 4, 4)
    cache = PagedKVCache(GQASpec(1, 1), layout, 1, 3000)
    cache.add(0)
    cache.commit(cache.plan([(0, 10_001)]))
    table = cache._sequences.get(0).table
    reads = 0

    class Counting(list[int]):
        def __getitem__(self, index):  # type: ignore[no-untyped-def, override]
            nonlocal reads
            result = super().__getitem__(index)
            reads += len(result) if isinstance(index, slice) else 1
            return result

    table.ids = Counting(table.ids)
    plan = cache.plan([(0, 1)])
    assert plan.slot_mapping.tolist() == [10_001]
    assert 0 < reads < 10


def test_writes_are_segments_or_indices_and_skip_what_is_not_owned() -> None:
    assert Writes.of(torch.tensor([-1, -1]), CPU) == Writes()
    assert Writes.of(torch.tensor([-1, 7]), CPU).segments == ((1, 2, 7),)
    assert Writes.of(torch.tensor([3, 4, -1, 5, 9, 10]), CPU).segments == (
        (0, 2, 3),
        (3, 4, 5),
        (4, 6, 9),
    )
    scattered = torch.arange(SEGMENTS_MAX + 1) * 2
    writes = Writes.of(scattered, CPU)
    assert writes.segments == ()
    assert writes.rows is not None and writes.slots is not None
    assert torch.equal(writes.slots, scattered)
    assert writes.rows.tolist() == list(range(SEGMENTS_MAX + 1))


def test_devices_other_than_the_cpu_get_a_slot_for_every_row() -> None:
    slots = torch.tensor([-1, 7, 3, -1])
    writes = Writes.of(slots, torch.device("meta"))
    assert (writes.segments, writes.rows) == ((), None)
    assert writes.slots is not None
    assert (writes.slots.device.type, writes.slots.shape) == ("meta", slots.shape)


def test_a_table_that_could_not_be_written_is_written_whole_next_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = cache_with([23], ranks=1)
    cache.fork(0, "fork")
    resize = cache.tables._resize

    def fail(*_: int) -> None:
        monkeypatch.setattr(cache.tables, "_resize", resize)
        raise MemoryError

    monkeypatch.setattr(cache.tables, "_resize", fail)
    with pytest.raises(MemoryError):
        cache.plan([("fork", 1)])
    plan = cache.plan([("fork", 1)])
    keys = plan.paged()
    blocks = plan.block_table[0].tolist()
    assert keys.block_table[keys.request[0], : len(blocks)].tolist() == blocks
    assert (int(keys.lo), int(keys.hi)) == (0, 24)
