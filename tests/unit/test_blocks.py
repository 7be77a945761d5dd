"""The block pool: counting, runs, reuse of content and its eviction."""

from __future__ import annotations

import pytest

from cplayers.cache import BlockPool
from cplayers.cache.blocks import chain_hash
from cplayers.errors import CacheFullError, StateError


def fill(pool: BlockPool, *units: bytes) -> list[int]:
    """One block per unit, registered under the unit's name and released again in that order."""
    blocks = []
    for unit in units:
        (block,) = pool.allocate(1)
        pool.register(unit, [block])
        blocks.append(block)
    for block in blocks:
        pool.release([block])
    return blocks


def test_blocks_come_in_runs_and_a_run_goes_on_where_it_ended() -> None:
    pool = BlockPool(20)
    first = pool.allocate(3)
    second = pool.allocate(4)
    assert first == [0, 1, 2]
    assert second == list(range(second[0], second[0] + 4))
    assert second[0] > 3, "there is no room behind the first run"
    assert pool.allocate(2, after=first[-1]) == [3, 4]
    assert pool.allocate(1, after=second[-1]) == [second[-1] + 1]
    assert (pool.num_used, pool.num_available, pool.num_blocks) == (10, 10, 20)


def test_a_run_that_meets_another_continues_in_the_largest_gap() -> None:
    pool = BlockPool(10)
    pool.allocate(10)
    pool.release([1, 2, 5, 6, 7])
    assert pool.allocate(5, after=0) == [1, 2, 5, 6, 7]


def test_growing_sequences_stay_in_one_run_each() -> None:
    pool = BlockPool(64)
    tables = [pool.allocate(2) for _ in range(4)]
    for _ in range(6):
        for table in tables:
            table += pool.allocate(1, after=table[-1])
    assert len({block for table in tables for block in table}) == 4 * 8
    for table in tables:
        assert table == list(range(table[0], table[0] + 8))


def test_a_trial_changes_nothing_until_it_is_applied() -> None:
    pool = BlockPool(4)
    trial = pool.trial()
    assert trial.pick(2) + trial.pick(1) == trial.taken
    assert len(set(trial.taken)) == 3
    assert (pool.num_used, [pool.refs(b) for b in range(4)]) == (0, [0] * 4)
    with pytest.raises(CacheFullError, match="2 more blocks are needed and 1 of 4 are left"):
        trial.pick(2)
    assert len(trial.taken) == 3
    pool.apply(trial)
    assert (pool.num_used, pool.num_available) == (3, 1)
    assert [pool.refs(b) for b in sorted(trial.taken)] == [1, 1, 1]


def test_a_trial_that_came_too_late_takes_nothing() -> None:
    pool = BlockPool(2)
    trial = pool.trial()
    trial.pick(2)
    (taken,) = pool.allocate(1)
    with pytest.raises(StateError, match=f"block {taken} was taken since"):
        pool.apply(trial)
    assert pool.num_used == 1


def test_a_full_pool_says_what_is_missing_and_what_to_do() -> None:
    pool = BlockPool(3)
    pool.allocate(2)
    with pytest.raises(CacheFullError, match=r"2 more .* and 1 of 3 are left: free or truncate"):
        pool.allocate(2)
    assert pool.num_available == 1


def test_shared_blocks_are_free_after_the_last_release() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.share(blocks)
    assert [pool.refs(b) for b in blocks] == [2, 2]
    assert not pool.is_private(blocks)
    pool.release(blocks)
    assert (pool.num_used, pool.is_private(blocks)) == (2, True)
    pool.release(blocks)
    assert (pool.num_used, pool.num_available) == (0, 4)
    with pytest.raises(StateError, match="released more often than it was taken"):
        pool.release(blocks)
    with pytest.raises(StateError, match="is free: only live blocks can be shared"):
        pool.share(blocks)


def test_released_content_is_found_again_up_to_the_first_gap() -> None:
    pool = BlockPool(8)
    blocks = fill(pool, b"a", b"b", b"c")
    assert pool.num_available == 8
    assert pool.lookup([b"a", b"b", b"x", b"c"]) == blocks[:2]
    assert pool.lookup([b"b"]) == blocks[1:2]
    pool.share(blocks[:1])
    assert (pool.num_used, pool.refs(blocks[0])) == (1, 1)
    assert (pool.stats.hits, pool.stats.queries) == (3, 4)


def test_the_first_registration_of_content_wins() -> None:
    pool = BlockPool(4)
    a, b = pool.allocate(2)
    pool.register(b"x", [a])
    pool.register(b"x", [b])
    pool.register(b"y", [a])
    assert (pool.lookup([b"x"]), pool.lookup([b"y"])) == ([a], [])
    assert (pool.is_hashed(a), pool.is_hashed(b)) == (True, False)


def test_free_blocks_are_taken_before_reusable_ones_and_those_in_order_of_age() -> None:
    pool = BlockPool(5)
    a, b, c = fill(pool, b"a", b"b", b"c")
    pool.allocate(2)
    assert pool.lookup([b"a"]) == [a], "two blocks were free"
    assert pool.allocate(1) == [a]
    assert (pool.lookup([b"a"]), pool.lookup([b"b"]), pool.lookup([b"c"])) == ([], [b], [c])
    pool.share([b])
    pool.release([b])
    assert pool.allocate(1) == [c], "b was used last"
    assert pool.stats.evicted == 2


def test_a_trial_evicts_only_what_its_picks_need_together() -> None:
    pool = BlockPool(6)
    a, b, c = fill(pool, b"a", b"b", b"c")
    trial = pool.trial()
    picks = [trial.pick(2), trial.pick(2), trial.pick(1)]
    assert sorted(block for blocks in picks for block in blocks) == sorted({*range(6)} - {c})
    assert pool.lookup([b"a"]) == [a], "nothing is lost before the trial is applied"
    pool.apply(trial)
    assert [pool.lookup([key]) for key in (b"a", b"b", b"c")] == [[], [], [c]]
    assert (pool.num_used, pool.stats.evicted) == (5, 2)
    assert pool.is_private([a, b])


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    for block in blocks:
        pool.register(bytes([block]), [block])
    pool.release(blocks)
    assert pool.allocate(1) == blocks[2:]
    assert pool.lookup([bytes([block]) for block in blocks]) == blocks[:2]


def test_evicted_blocks_are_handed_out_as_a_run() -> None:
    pool = BlockPool(12)
    blocks = pool.allocate(12)
    for block in blocks:
        pool.register(bytes([block]), [block])
    pool.release(blocks)  # the last ones are evicted first, one after the other
    assert pool.allocate(5) == blocks[-5:]
    assert pool.stats.evicted == 5


def test_a_unit_is_forgotten_as_a_whole() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(4)
    pool.register(b"u", blocks[:3])
    pool.release(blocks)
    (taken,) = pool.allocate(1, after=2)
    assert taken == 3, "the free block comes first"
    pool.allocate(1)
    assert pool.lookup([b"u"]) == []
    assert not any(pool.is_hashed(block) for block in blocks)
    assert (pool.stats.evicted, pool.num_available) == (3, 2)


def test_a_pool_grows_and_keeps_what_it_holds() -> None:
    pool = BlockPool(2)
    blocks = pool.allocate(2)
    pool.grow(5)
    pool.grow(3)
    assert (pool.num_blocks, pool.num_used, pool.num_available) == (5, 2, 3)
    assert sorted(blocks + pool.allocate(3)) == [0, 1, 2, 3, 4]


def test_a_hash_depends_on_the_tokens_and_on_all_before() -> None:
    a, b = chain_hash(b"", [1, 2]), chain_hash(b"", [1, 3])
    assert len({a, b, chain_hash(a, [1, 2]), chain_hash(b, [1, 2]), chain_hash(b"", [1])}) == 5
    assert chain_hash(a, [3]) == chain_hash(chain_hash(b"", iter([1, 2])), (3,))
