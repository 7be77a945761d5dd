"""The paged cache: steps that count or do not, sharing, prefix reuse, capacity."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cplayers.cache import GQASpec, InterleavedLayout, PagedKVCache, StepPlan
from cplayers.errors import CacheFullError, ConfigError, StateError

GOLD = json.loads((Path(__file__).parents[1] / "gold" / "placement.json").read_text())


def caches(
    ranks: int = 2, interleave: int = 2, block: int = 4, num_blocks: int = 16, layers: int = 1
) -> list[PagedKVCache]:
    """One cache per rank of a group."""
    layout = InterleavedLayout(ranks, interleave, block)
    return [
        PagedKVCache(GQASpec(1, 1), layout, layers, num_blocks, rank, torch.float64)
        for rank in range(ranks)
    ]


def write(cache: PagedKVCache, plan: StepPlan, tokens: Sequence[int], layer: int = 0) -> None:
    """Store each packed token's id in k and its negative in v."""
    k = torch.tensor(tokens, dtype=torch.float64).reshape(-1, 1, 1)
    decode = k[plan.tokens[: plan.num_decode]]
    cache.write(plan, layer, plan.decode_writes, decode, -decode)
    for writes in plan.prefill_writes:  # without PCP one shard, in packed order
        prompt = k[plan.tokens[plan.num_decode :]]
        cache.write(plan, layer, writes, prompt, -prompt)


def step(group: list[PagedKVCache], seq: str, tokens: Sequence[int]) -> None:
    for cache in group:
        plan = cache.plan([(seq, len(tokens))])
        for layer in range(cache.num_layers):
            write(cache, plan, tokens, layer)
        cache.commit(plan)


def stored(group: list[PagedKVCache], seq: str, layer: int = 0) -> list[int]:
    """Content of a sequence, put together from all ranks, position after position."""
    result: dict[int, int] = {}
    for rank, cache in enumerate(group):
        table = torch.tensor(cache.block_table(seq), dtype=torch.long)
        pos = cache.layout.positions(rank, cache.length(seq))
        for position, slot in zip(
            pos.tolist(), cache.layout.slots(pos, table, rank).tolist(), strict=True
        ):
            k, v = cache.view(layer, slot, 1)
            assert float(k) == -float(v)
            assert position not in result
            result[position] = int(k)
    assert sorted(result) == list(range(group[0].length(seq)))
    return [result[position] for position in range(len(result))]


@pytest.mark.parametrize("case", GOLD["placement"])
def test_plans_place_tokens_as_worked(case: dict[str, Any]) -> None:
    layout = InterleavedLayout(case["cp_size"], case["interleave_size"], case["block_size"])
    for rank, slots in enumerate(case["slots"]):
        cache = PagedKVCache(GQASpec(1, 1), layout, 1, max(case["block_table"]) + 1, rank)
        cache.pool.allocate(cache.pool.num_blocks)  # one block at a time is given back, in order
        table = list(case["block_table"])
        cache.add("a")
        for position, slot in enumerate(slots):
            if cache.blocks_for([("a", 1)]):
                cache.pool.release([table.pop(0)])
            plan = cache.plan([("a", 1)])
            assert plan.slot_mapping.tolist() == [slot]
            assert plan.positions.tolist() == [position]
            cache.commit(plan)
        assert cache.block_table("a") == tuple(case["block_table"])
        assert int(plan.spans.hi) == case["lengths"][rank]


def test_every_layer_and_rank_reads_back_what_was_written() -> None:
    group = caches(ranks=3, interleave=3, block=4, layers=2)
    for cache in group:
        cache.add("a")
        cache.add("b")
    step(group, "a", range(100, 117))
    step(group, "b", range(200, 202))
    step(group, "a", [117])
    for layer in (0, 1):
        assert stored(group, "a", layer) == list(range(100, 118))
        assert stored(group, "b", layer) == [200, 201]


def test_a_failed_step_leaves_everything_as_it_was() -> None:
    group = caches()
    prompt = list(range(1, 20))
    for cache in group:
        cache.add("a", prompt)
    step(group, "a", prompt)
    cache = group[0]
    before = (cache.length("a"), cache.block_table("a"), cache.pool.num_available)
    plan = cache.plan([("a", 30)])
    write(cache, plan, range(1000, 1030))
    # ... a layer raises here: the plan is never committed
    assert (cache.length("a"), cache.block_table("a"), cache.pool.num_available) == before
    assert stored(group, "a") == prompt
    assert cache.add("b", prompt) == 16, "the content is still known"
    for other in group[1:]:
        other.add("b", prompt)
    step(group, "a", range(20, 50))
    assert stored(group, "a") == list(range(1, 50))
    assert stored(group, "b") == prompt[:16]


def test_a_step_that_fails_on_one_rank_alone_leaves_the_ranks_alike() -> None:
    group = caches(num_blocks=4)
    prompt = list(range(1, 34))
    for cache in group:
        cache.add("a", prompt[:32])
    step(group, "a", prompt[:32])
    for cache in group:
        cache.free("a")
        cache.add("b")
    plans = [cache.plan([("b", 9)]) for cache in group]  # has to evict content of "a"
    write(group[1], plans[1], range(9))  # rank 0 raises before its first write
    assert [cache.add("c", prompt) for cache in group] == [16, 16]
    assert stored(group, "c") == prompt[:16]


def test_a_full_cache_is_noticed_before_anything_changes() -> None:
    group = caches(num_blocks=3)
    for cache in group:
        cache.add("a")
        cache.add("b")
    step(group, "a", range(16))
    for cache in group:
        with pytest.raises(CacheFullError, match=r"2 more blocks are needed and 1 of 3 are left"):
            cache.plan([("a", 0), ("b", 9)])
        assert (cache.length("b"), cache.block_table("b")) == (0, ())
        assert cache.pool.num_available == 1
    assert stored(group, "a") == list(range(16))
    step(group, "b", range(8))
    assert stored(group, "b") == list(range(8))


def test_a_fork_shares_blocks_until_one_side_writes() -> None:
    group = caches(layers=2)
    for cache in group:
        cache.add("a")
    step(group, "a", range(11))
    for cache in group:
        cache.fork("a", "b")
        assert cache.pool.num_used == 2
        assert cache.blocks_for([("b", 1)]) == 1, "the part-filled block is copied"
    step(group, "b", [911, 912])
    assert group[0].block_table("a")[0] == group[0].block_table("b")[0]
    assert group[0].block_table("a")[1] != group[0].block_table("b")[1]
    step(group, "a", [11])
    for layer in (0, 1):
        assert stored(group, "a", layer) == list(range(12))
        assert stored(group, "b", layer) == [*range(11), 911, 912]
    for cache in group:
        cache.free("a")
        assert cache.pool.num_used == 2
    assert stored(group, "b") == [*range(11), 911, 912]


def test_both_sides_of_a_fork_may_write_in_one_step() -> None:
    group = caches()
    for cache in group:
        cache.add("a")
    step(group, "a", range(5))
    for cache in group:
        cache.fork("a", "b")
        plan = cache.plan([("a", 1), ("b", 1)])
        write(cache, plan, [50, 60])
        cache.commit(plan)
        assert cache.pool.num_used == 2
    assert stored(group, "a") == [0, 1, 2, 3, 4, 50]
    assert stored(group, "b") == [0, 1, 2, 3, 4, 60]


def test_a_fork_does_not_announce_the_rest_of_the_prompt() -> None:
    group = caches()
    prompt = list(range(1, 18))
    for cache in group:
        cache.add("a", prompt)
    step(group, "a", prompt[:6])
    for cache in group:
        cache.fork("a", "b")
    step(group, "b", range(906, 920))
    assert [cache.add("c", prompt) for cache in group] == [0, 0]
    step(group, "a", prompt[6:])
    assert [cache.add("d", prompt) for cache in group] == [16, 16]
    assert stored(group, "d") == prompt[:16]


def test_truncation_frees_blocks_and_what_follows_is_new() -> None:
    group = caches()
    prompt = list(range(1, 25))
    for cache in group:
        cache.add("a", prompt)
    step(group, "a", prompt)
    for cache in group:
        cache.truncate("a", 11)
        assert (cache.length("a"), len(cache.block_table("a"))) == (11, 2)
    step(group, "a", range(911, 920))
    assert stored(group, "a") == [*prompt[:11], *range(911, 920)]
    assert [cache.add("b", prompt) for cache in group] == [8, 8]


def test_truncation_to_the_present_length_cuts_nothing() -> None:
    group = caches()
    prompt = list(range(1, 18))
    for cache in group:
        cache.add("a", prompt)
    step(group, "a", prompt[:6])
    for cache in group:
        cache.truncate("a", 6)
    step(group, "a", prompt[6:])
    assert [cache.add("b", prompt) for cache in group] == [16, 16]


def test_a_prefix_is_reused_in_whole_units_and_never_wholly() -> None:
    group = caches(ranks=2, interleave=3, block=4)  # a unit is 3 blocks, 24 tokens
    prompt = list(range(1, 49))
    for cache in group:
        assert cache.add("a", prompt) == 0
    step(group, "a", prompt)
    for cache in group:
        assert cache.add("same", prompt) == 24, "one token at least is left to compute"
        assert cache.add("longer", [*prompt, 7]) == 48
        assert cache.add("shorter", prompt[:40]) == 24
        assert cache.add("other", [0, *prompt[1:]]) == 0
        assert cache.add("untold") == 0
    assert stored(group, "longer") == prompt
    step(group, "same", prompt[24:])
    assert stored(group, "same") == prompt


@pytest.mark.parametrize(("interleave", "block"), [(1, 4), (4, 4), (16, 16), (8, 4), (3, 16)])
def test_a_prefix_hit_ends_before_the_first_difference(interleave: int, block: int) -> None:
    group = caches(ranks=2, interleave=interleave, block=block, num_blocks=400)
    first, second = [23333] * 150 + [12222] * 400, [23333] * 150 + [12223] * 400
    for cache in group:
        cache.add("first", first)
    step(group, "first", first)
    unit = group[0].layout.unit_tokens
    hits = [cache.add("second", second) for cache in group]
    assert hits == [150 // unit * unit] * 2
    assert 0 < hits[0] < 150
    assert hits[0] % (block * 2) == 0
    assert stored(group, "second") == second[: hits[0]]


def test_content_that_was_freed_is_found_until_its_blocks_are_needed() -> None:
    group = caches(num_blocks=4)
    prompt = list(range(1, 18))
    for cache in group:
        cache.add("a", prompt)
    step(group, "a", prompt)
    for cache in group:
        cache.free("a")
        assert (cache.pool.num_used, cache.used_bytes) == (0, 0)
        assert cache.add("b", prompt) == 16
        cache.free("b")
        cache.add("c")
    step(group, "c", range(32))
    for cache in group:
        cache.free("c")
        assert cache.add("d", prompt) == 0


def test_a_stale_plan_is_refused() -> None:
    (cache,) = caches(ranks=1)
    cache.add("a")
    old = cache.plan([("a", 1)])
    new = cache.plan([("a", 2)])
    with pytest.raises(StateError, match="the plan is stale"):
        cache.commit(old)
    with pytest.raises(StateError, match="plan the step again"):
        write(cache, old, [1])
    cache.add("b")  # changes no sequence and takes no block of the plan
    cache.commit(new)
    assert cache.length("a") == 2
    with pytest.raises(StateError, match="stale"):
        cache.commit(new)
    for change in (
        lambda: cache.truncate("a", 1),
        lambda: cache.fork("a", "c"),
        lambda: cache.free("a"),
    ):
        plan = cache.plan([("a", 1)])
        change()
        with pytest.raises(StateError, match="stale"):
            cache.commit(plan)


@pytest.mark.parametrize("shared", [False, True])
def test_another_sequence_may_be_freed_amid_a_step(shared: bool) -> None:
    (cache,) = group = caches(ranks=1, num_blocks=4)
    cache.add("a")
    step(group, "a", [1, 2, 3, 4, 5])
    if shared:
        cache.fork("a", "b")
    else:
        cache.add("b")
        step(group, "b", [9, 9])
    plan = cache.plan([("a", 1)])
    write(cache, plan, [6])
    cache.free("b")
    cache.commit(plan)
    assert stored(group, "a") == [1, 2, 3, 4, 5, 6]
    assert cache.pool.num_used == 2


def test_the_cache_keeps_no_graph_of_what_is_written() -> None:
    for interleave in (1, 4):  # rows by index, and by segment
        cache = caches(ranks=2, interleave=interleave, num_blocks=16)[0]
        cache.add("a")
        plan = cache.plan([("a", 40)])
        (writes,) = plan.prefill_writes
        assert (writes.rows is None) == (interleave == 4)
        k = torch.randn(40, 1, 1, dtype=torch.float64, requires_grad=True)
        cache.write(plan, 0, writes, k, -k)
        keys, values = cache.view(0, 0, 20)
        assert keys.any()
        assert not keys.requires_grad
        assert not values.requires_grad


def test_wrong_names_and_numbers_are_refused() -> None:
    (cache,) = caches(ranks=1)
    cache.add("a")
    with pytest.raises(ConfigError, match="seq='a': the name of a sequence is unique"):
        cache.add("a")
    with pytest.raises(ConfigError, match="seq='a': the name of a sequence is unique"):
        cache.fork("a", "a")
    with pytest.raises(ConfigError, match=r"seq='x': .* known: \('a',\)"):
        cache.plan([("x", 1)])
    with pytest.raises(ConfigError, match="a step names a sequence once"):
        cache.plan([("a", 1), ("a", 1)])
    with pytest.raises(ConfigError, match="new tokens of 'a'=-1"):
        cache.plan([("a", -1)])
    with pytest.raises(ConfigError, match=r"length=1: 'a' holds 0 tokens and can only be cut"):
        cache.truncate("a", 1)
    assert cache.seqs == ("a",)


@pytest.mark.parametrize(
    ("name", "value"), [("cp_rank", 2), ("pcp_rank", 1), ("num_blocks", 0), ("pcp_size", 0)]
)
def test_a_cache_outside_its_group_is_refused(name: str, value: int) -> None:
    arguments: dict[str, Any] = {"num_blocks": 4, name: value}
    with pytest.raises(ConfigError, match=f"{name}={value}"):
        PagedKVCache(GQASpec(1, 1), InterleavedLayout(2, 2, 4), 1, **arguments)


def test_a_cache_grows_and_keeps_its_content() -> None:
    group = caches(num_blocks=2)
    for cache in group:
        cache.add("a")
    step(group, "a", range(16))
    for cache in group:
        assert cache.blocks_for([("a", 17)]) == 3
        with pytest.raises(CacheFullError):
            cache.plan([("a", 17)])
        cache.grow(5)
        cache.grow(3)
        assert cache.pool.num_blocks == 5
    step(group, "a", range(16, 33))
    assert stored(group, "a") == list(range(33))


def test_bytes_of_a_rank() -> None:
    layout = InterleavedLayout(2, 2, 4)
    gqa = PagedKVCache(GQASpec(num_kv_heads=3, head_dim=8), layout, 5, 10, dtype=torch.bfloat16)
    assert gqa.token_bytes == 2 * 3 * 8 * 5 * 2
    assert gqa.nbytes == 10 * 4 * gqa.token_bytes
    gqa.add("a")
    gqa.commit(gqa.plan([("a", 9)]))
    assert gqa.used_bytes == 2 * 4 * gqa.token_bytes
