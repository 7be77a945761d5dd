"""Sequences that wait beside a cache: nothing of it is touched unless all of them can be taken."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
import weakref
from dataclasses import replace

import pytest
import torch
from transfer_cases import Case, Side, check, fill, same, snapshot

from cplayers import CPMesh, Topology
from cplayers.cache import BlockShard, Landing, PagedKVCache, Plane
from cplayers.cache.landing import Arrival
from cplayers.errors import CacheFullError, ConfigError, StateError, TransferError
from cplayers.serving import Passage, hand_over

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


def emptied(length: int) -> BlockShard:
    """A signed shard of a sequence of which everything was forgotten: a header without rows."""
    cache = SIDE.cache(0, 1)
    header = replace(cache.blank(), length=length, oldest=length)
    return BlockShard.of(header, torch.empty(0, 2, header.features, dtype=cache.dtype))


@pytest.mark.parametrize("length", [4 * 2**20 + 4, 2**27, 2**40 - 1])
def test_a_header_does_not_say_how_much_memory_is_taken(length: int) -> None:
    cache = SIDE.cache(0, 40)
    shard, before = emptied(length), snapshot(cache)
    tracemalloc.start()
    with pytest.raises(TransferError, match="at most 1048576 forgotten blocks"):
        cache.import_blocks("a", [shard])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    assert same(before, snapshot(cache))


def test_a_pool_that_is_too_small_is_noticed_before_a_table_is_made() -> None:
    cache = SIDE.cache(0, 40)
    shard = emptied(4 * 2**20)
    header = replace(shard.header, length=4 * 2**20 + 2**30)
    tracemalloc.start()
    with pytest.raises(CacheFullError, match="268435456 more blocks are needed"):
        Landing(cache).expect("a", header)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000


def test_more_may_have_been_forgotten_than_the_pool_holds() -> None:
    source = SIDE.cache(0, 8)
    source.add("a")
    for _ in range(10):
        fill(source, SIDE, 0, "a", 16, 0.5)
        source.forget("a", source.length("a") - 7)
    fill(source, SIDE, 0, "a", 5, 0.5)
    cache = SIDE.cache(0, 4)
    assert cache.import_blocks("a", [source.export_blocks("a")]) == 165
    assert check(cache, SIDE, 0, "a", 153, 0.5) == 12
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


def damaged() -> list[BlockShard]:
    first, second = exported()
    return [first, replace(second, checksums=second.checksums + 1)]


@pytest.mark.parametrize("way", ["alone", "agree", "other", "group"])
def test_what_was_refused_takes_no_memory(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that came are gone with the error, and do not wait for the garbage collector."""
    cache, source = SIDE.cache(0, 40), SIDE.cache(0, 40)
    source.import_blocks("a", exported())
    came: list[weakref.ref[Arrival]] = []
    fill_in = Arrival.fill

    def noted(arrival: Arrival, *given: object) -> None:
        fill_in(arrival, *given)
        came.append(weakref.ref(arrival))
        if way == "group":
            raise TransferError("rows", "that cannot be", "taken")

    monkeypatch.setattr(Arrival, "fill", noted)
    gc.disable()
    try:
        with contextlib.suppress(TransferError):
            if way == "group":
                hand_over(CPMesh(Topology()), "pcp", [Passage("a", source, cache)])
            elif way == "other":
                cache.import_blocks("a", exported(), agree=lambda ok: False)
            else:
                cache.import_blocks("a", damaged(), agree=bool if way == "agree" else None)
        assert came
        assert [arrival() for arrival in came] == [None] * len(came)
    finally:
        gc.enable()
    assert cache.seqs == ()


def with_planes(shard: BlockShard, *planes: Plane) -> BlockShard:
    """Signed anew, so that nothing but its planes is wrong."""
    return BlockShard.of(replace(shard.header, planes=planes), shard.rows)


@pytest.mark.parametrize(
    "planes",
    [
        (Plane("k", 2, 2), Plane("v", 2, 4)),
        (Plane("k", 2, 3), Plane("zz", 2, 3)),
        (Plane("k", 1, 6), Plane("v", 1, 6)),
        (Plane("k", 1, 3), Plane("v", 3, 3)),
        (Plane("k", 2, 6),),
    ],
    ids=str,
)
@pytest.mark.parametrize("place", [0, 1])
def test_no_shard_may_have_other_planes(planes: tuple[Plane, ...], place: int) -> None:
    shards = exported()
    shards[place] = with_planes(shards[place], *planes)
    cache = SIDE.cache(0, 40)
    before = snapshot(cache)
    for agree in (None, bool):
        with pytest.raises(TransferError, match="a shard with planes"):
            cache.import_blocks("a", shards, agree=agree)
    assert same(before, snapshot(cache))
