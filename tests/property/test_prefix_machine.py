"""Reuse of prefixes: two prompts that part at token 150, on a grid, and the machine at length."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import settings
from test_block_pool_machine import MOST_SEQUENCES, CacheMachine

from cplayers.cache import GQASpec, InterleavedLayout, PagedKVCache

FIRST = [23333] * 150 + [12222] * 400
SECOND = [23333] * 150 + [12223] * 400


def caches(ranks: int, interleave: int, block: int) -> list[PagedKVCache]:
    layout = InterleavedLayout(ranks, interleave, block)
    blocks = 2 * layout.blocks(len(FIRST))
    return [
        PagedKVCache(GQASpec(1, 1), layout, 1, blocks, rank, torch.float64) for rank in range(ranks)
    ]


def store(group: list[PagedKVCache], seq: str, tokens: list[int]) -> None:
    """Compute what is missing of a prompt; each key says its token and its position."""
    start = group[0].length(seq)
    packed = [1000.0 * tokens[p] + p for p in range(start, len(tokens))]
    keys = torch.tensor(packed, dtype=torch.float64).view(-1, 1, 1)
    for cache in group:
        plan = cache.plan([(seq, len(packed))], max_decode_tokens=0)
        (writes,) = plan.prefill_writes
        cache.write(plan, 0, writes, keys, -keys)
        cache.commit(plan)


def stored(group: list[PagedKVCache], seq: str) -> list[tuple[int, int]]:
    """(token, position) of every key of a sequence, dealt to the ranks one by one."""
    layout = group[0].layout
    local = [0] * len(group)
    found = []
    for position in range(group[0].length(seq)):
        rank = position // layout.interleave_size % len(group)
        table, size = group[rank].block_table(seq), layout.block_size
        slot = table[local[rank] // size] * size + local[rank] % size
        local[rank] += 1
        found.append(divmod(int(group[rank].view(0, slot, 1)[0]), 1000))
    return found


def largest_hit(ranks: int, interleave: int, block: int) -> int:
    """Most of the 150 tokens after which a round of runs is whole, and all blocks are."""
    counts, best = [0] * ranks, 0
    for position in range(150):
        counts[position // interleave % ranks] += 1
        whole = (position + 1) % (interleave * ranks) == 0
        if whole and all(count % block == 0 for count in counts):
            best = position + 1
    return best


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("block", [1, 2, 4, 16, 64])
@pytest.mark.parametrize("interleave", [1, 2, 3, 4, 16, 40, 64])
def test_a_hit_ends_before_the_first_difference(ranks: int, block: int, interleave: int) -> None:
    """vLLM 26296: at most 150 tokens, a multiple of B*N; what is found is what was stored."""
    group = caches(ranks, interleave, block)
    assert [cache.add("first", FIRST) for cache in group] == [0] * ranks
    store(group, "first", FIRST)
    hits = [cache.add("second", SECOND) for cache in group]
    assert hits == [largest_hit(ranks, interleave, block)] * ranks
    assert hits[0] <= 150 and hits[0] % (block * ranks) == 0
    store(group, "second", SECOND)
    for seq, tokens in (("first", FIRST), ("second", SECOND)):
        assert stored(group, seq) == [(token, p) for p, token in enumerate(tokens)]
    for cache in group:  # the first prompt leaves, and is found again but for its last token
        cache.free("first")
    again = [cache.add("again", FIRST) for cache in group]
    assert again == [again[0]] * ranks
    assert again[0] % (block * ranks) == 0 and hits[0] <= again[0] < len(FIRST)
    assert stored(group, "again") == [(token, p) for p, token in enumerate(FIRST[: again[0]])]


RARE = ("fork", "free", "free", "cut", "forget")


def run_long(seed: int, steps: int) -> CacheMachine:
    """The machine's rules, in an order that a seed gives: more than Hypothesis can record."""
    rng = random.Random(seed)
    machine = CacheMachine()
    while not hasattr(machine, "layout") or machine.layout.unit_tokens > 12:  # or nothing is found
        machine.build(
            pcp=rng.randint(1, 3),
            places=rng.randint(0, 2),
            interleave=rng.randint(1, 5),
            block=rng.choice([1, 2, 3]),
        )
    for _ in range(steps):
        crowded = machine.caches[0].pool.num_available < 3 and rng.random() < 0.7
        if crowded or len(machine.models) == MOST_SEQUENCES:
            machine.free(rng)
        rule = rng.choice(["add", *["add_prompt"] * 3, *["step"] * 6, *RARE])
        if rng.random() < 0.02:
            machine.evict()
        elif rule == "add":
            machine.add()
        elif rule == "add_prompt":
            machine.add_prompt(
                rng.randint(0, 2), rng.randint(0, 30), rng.randint(1, 36), rng.random() < 0.7
            )
        elif rule == "fork" and machine.models:
            machine.fork(rng)
        elif rule == "free" and machine.models:
            machine.free(rng)
        elif rule == "cut" and machine.models:
            machine.truncate(rng)
        elif rule == "forget" and machine.models:
            machine.forget(rng)
        elif machine.models:
            machine.step(
                rng,
                fate=rng.choice(["commit", "commit", "commit", "fail", "replan"]),
                seed=rng.randint(0, 99),
                most=rng.choice([16, 0, 2]),
                window=rng.choice([None, rng.randint(1, 20)]),
                workspace=rng.choice([100, 1, 6]),
            )
        machine.content_is_the_models()
        machine.blocks_are_counted()
        machine.ranks_are_alike()
    return machine


@pytest.mark.parametrize("seed", range(4))
def test_300_steps_keep_every_invariant_and_answer(seed: int) -> None:
    run_long(seed, 300)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 106))
def test_1000_steps_keep_every_invariant_and_answer(seed: int) -> None:
    stats = run_long(seed, 1000).caches[0].pool.stats
    assert min(stats.hits, stats.evicted, stats.released) > 10, "or it did not get about"


def test_the_machine_reads_in_every_way() -> None:
    """Each way of reading is called from a short run: the machine checks what it says."""
    called: set[str] = set()

    class Watched(CacheMachine):
        def check_reads(self, plans: Any, decoding: bool, *rest: Any) -> None:
            called.add(f"reads {decoding}")
            super().check_reads(plans, decoding, *rest)

        def check_context(self, plans: Any, decoding: bool, *rest: Any) -> None:
            called.add(f"context {decoding}")
            super().check_context(plans, decoding, *rest)

        def sent(self, *args: Any) -> Any:
            called.add("exchange")
            return super().sent(*args)

    machine = Watched.TestCase
    machine.settings = settings(deadline=None, derandomize=True, max_examples=10)
    machine("runTest").runTest()
    assert called == {"reads True", "reads False", "context True", "context False", "exchange"}
