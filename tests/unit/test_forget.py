"""Giving back the blocks that no window reaches any more."""

from __future__ import annotations

import pytest

from cplayers.cache import GQASpec, InterleavedLayout, PagedKVCache
from cplayers.errors import ConfigError, StateError

LAYOUT = InterleavedLayout(cp_size=2, interleave_size=3, block_size=4)


def cache_of(length: int, tokens: list[int] | None = None, blocks: int = 12) -> PagedKVCache:
    cache = PagedKVCache(GQASpec(1, 2), LAYOUT, 1, blocks)
    cache.add("a", tokens)
    cache.commit(cache.plan([("a", length)]))
    return cache


def last_position_in(blocks: int) -> int:
    """The last position that lies in the first so many blocks of either rank."""
    held = [[p for p in range(200) if p // 3 % 2 == rank] for rank in range(2)]
    return max(positions[4 * blocks - 1] for positions in held)


def test_blocks_go_back_once_all_their_tokens_are_behind() -> None:
    cache = cache_of(60)
    taken = cache.pool.num_used
    assert taken == 8  # 30 tokens on rank 0
    table = cache.block_table("a")
    for position in range(60):
        cache.forget("a", position)
        gone = max(n for n in range(9) if n == 0 or last_position_in(n) < position)
        assert cache.pool.num_used == taken - gone
        assert cache.block_table("a") == (-1,) * gone + table[gone:]
    cache.free("a")
    assert cache.pool.num_used == 0


def test_going_back_or_beyond_the_end_is_harmless() -> None:
    cache = cache_of(20)
    cache.forget("a", 500)
    used = cache.pool.num_used
    cache.forget("a", 3)
    assert cache.pool.num_used == used
    assert cache.length("a") == 20
    cache.commit(cache.plan([("a", 7)]))  # what was beyond the end counts as the end
    assert cache.length("a") == 27


def test_a_window_that_still_reaches_them_is_told() -> None:
    cache = cache_of(40)
    cache.forget("a", 31)
    for requests, most in (([("a", 1)], 16), ([("a", 5)], 0)):
        plan = cache.plan(requests, max_decode_tokens=most)
        for window in (11, None):
            with pytest.raises(StateError, match=r"window=.* 31 were forgotten"):
                if most:
                    plan.reads(window)
                else:
                    assert plan.prefill is not None
                    plan.prefill.context.pieces(16, window)
        plan.reads(10)


def test_forks_share_what_is_left_and_cuts_stop_there() -> None:
    cache = cache_of(40)
    cache.forget("a", 21)
    used = cache.pool.num_used
    cache.fork("a", "b")
    assert cache.block_table("b") == cache.block_table("a")
    cache.free("a")
    assert cache.pool.num_used == used
    with pytest.raises(ConfigError, match=r"length=20.*before position 21 were forgotten"):
        cache.truncate("b", 20)
    cache.truncate("b", 21)
    cache.free("b")
    assert cache.pool.num_used == 0


def test_a_prefix_is_reused_only_while_all_of_it_is_there() -> None:
    tokens = list(range(100))
    cache = cache_of(48, tokens, blocks=9)
    cache.forget("a", 48)
    assert cache.add("b", tokens[:49]) == 48  # nobody needed the blocks yet
    cache.free("b")
    cache.add("c")
    cache.commit(cache.plan([("c", 40)]))  # 7 of 9 blocks: takes those of the second unit
    assert cache.add("d", tokens[:49]) == 24
    cache.free("d")
    cache.commit(cache.plan([("c", 14)]))  # and of the first
    assert cache.add("e", tokens[:49]) == 0


def test_plans_say_what_is_gone() -> None:
    cache = cache_of(40)
    cache.forget("a", 30)
    plan = cache.plan([("a", 1)])
    gone = cache.block_table("a").count(-1)
    assert gone > 0
    row = plan.block_table[0].tolist()
    assert row[:gone] == [-1] * gone
    assert -1 not in row[gone:]
