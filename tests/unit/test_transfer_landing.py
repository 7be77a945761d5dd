"""Sequences that wait beside a cache: nothing of it is touched unless all of them can be taken."""

from __future__ import annotations

import pytest
from transfer_cases import Case, Side, check, fill, same, snapshot

from cplayers.cache import BlockShard, Landing, PagedKVCache
from cplayers.errors import ConfigError, StateError

CASE = Case(Side((2, 2, 4)), Side((1, 4, 4)), 29, 0)
SIDE = CASE.target
PROMPT = list(range(100, 140))


def exported() -> list[BlockShard]:
    shards = []
    for rank in range(2):
        cache = CASE.source.cache(rank, 40)
        cache.add("a")
        fill(cache, CASE.source, rank, "a", 29, 0.5)
        shards.append(cache.export_blocks("a"))
    return shards


def waiting(cache: PagedKVCache, *names: str) -> Landing:
    landing = Landing(cache)
    for name in names:
        landing.from_shards(name, exported())
    return landing


def test_a_stale_landing_overwrites_nothing() -> None:
    cache = SIDE.cache(0, 40)
    cache.add("known", PROMPT)
    fill(cache, SIDE, 0, "known", 40, 0.25)
    cache.free("known")  # its content can still be found
    landing = waiting(cache, "a")
    cache.add("b")
    fill(cache, SIDE, 0, "b", 60, 0.75)
    before = snapshot(cache)
    with pytest.raises(StateError, match="was taken since the trial"):
        landing.commit()
    assert same(before, snapshot(cache))
    check(cache, SIDE, 0, "b", 0, 0.75)
    assert cache.add("c", [*PROMPT, 1]) == 40


@pytest.mark.parametrize("names", [("a", "b"), ("b", "a")])
def test_a_name_that_was_taken_meanwhile_is_refused_before_anything(names: tuple[str, str]) -> None:
    cache = SIDE.cache(0, 40)
    landing = waiting(cache, *names)
    cache.add("a")
    before = snapshot(cache)
    with pytest.raises(ConfigError, match="the name of a sequence is unique"):
        landing.commit()
    assert same(before, snapshot(cache))


def test_a_landing_is_committed_once() -> None:
    cache = SIDE.cache(0, 40)
    landing = waiting(cache, "a")
    landing.commit()
    before = snapshot(cache)
    with pytest.raises(ConfigError, match="the name of a sequence is unique"):
        landing.commit()
    assert same(before, snapshot(cache))


def test_a_name_is_expected_once() -> None:
    cache = SIDE.cache(0, 40)
    landing = waiting(cache, "a")
    with pytest.raises(ConfigError, match="the name of a sequence is unique"):
        landing.from_shards("a", exported())
    landing.commit()
    cache.free("a")
    assert cache.pool.num_used == 0


def test_a_write_that_fails_leaves_no_block_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = SIDE.cache(0, 40)
    landing = waiting(cache, "a")

    def fails(*given: object) -> None:
        raise MemoryError

    monkeypatch.setattr(cache.storage, "write", fails)
    with pytest.raises(MemoryError):
        landing.commit()
    assert (cache.seqs, cache.pool.num_used, cache.pool.num_available) == ((), 0, 40)
