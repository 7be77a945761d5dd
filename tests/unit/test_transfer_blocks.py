"""Sequences between caches of any layouts, as objects: exact, only what is there, or not at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transfer_cases
from transfer_cases import SALT, Case, Side, check, exported, fill, group, same, snapshot

from cplayers.cache import BlockShard, GQASpec, InterleavedLayout, PagedKVCache
from cplayers.errors import CacheFullError, ConfigError, TransferError

PROMPT = list(range(100, 190))


def imported(case: Case, shards: list[BlockShard], **options) -> list[PagedKVCache]:
    caches = group(case.target)
    for rank, cache in enumerate(caches):
        cache.add("b")
        fill(cache, case.target, rank, "b", 5, 3.0)
        first_head = case.target.place(rank)[1]
        length = cache.import_blocks("a", shards, first_head=first_head, **options)
        assert length == case.length
        check(cache, case.target, rank, "b", 0, 3.0)
    return caches


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("agree", [None, bool])
def test_any_layout_to_any_other(seed: int, agree: Callable[[bool], bool] | None) -> None:
    case = transfer_cases.draw(seed)
    caches = imported(case, exported(case), agree=agree)
    for rank, cache in enumerate(caches):
        check(cache, case.target, rank, "a", case.oldest, SALT)
        assert (cache.length("a"), cache.block_table("a").count(-1)) == (
            case.length,
            cache.layout.full_blocks(case.oldest),
        )
        fill(cache, case.target, rank, "a", 9, SALT)  # it goes on where it is now
        check(cache, case.target, rank, "a", case.oldest, SALT)
        cache.truncate("a", case.length)
        cache.free("a")
        cache.free("b")
        assert cache.pool.num_used == 0


def test_only_blocks_that_hold_a_token_are_exported() -> None:
    shards = exported(Case(Side((4, 16, 16)), Side((1, 16, 16)), 16, 0))
    assert [len(shard.header.blocks) for shard in shards] == [1, 0, 0, 0]
    assert [len(shard.rows) for shard in shards] == [16, 0, 0, 0]
    shards = exported(Case(Side((4, 1, 16)), Side((1, 16, 16)), 16, 0))
    assert [len(shard.rows) for shard in shards] == [4, 4, 4, 4]


def test_what_was_forgotten_stays_behind() -> None:
    case = Case(Side((2, 3, 4)), Side((3, 2, 4)), 40, 17)
    shards = exported(case)
    assert sum(len(shard.rows) for shard in shards) == 40 - 17
    assert [shard.header.oldest for shard in shards] == [17, 17]
    for cache in imported(case, shards):
        with pytest.raises(ConfigError, match="before position 17 were forgotten"):
            cache.truncate("a", 16)


def test_prefixes_stay_findable_where_units_are_equal() -> None:
    case = Case(Side((2, 2, 4)), Side((2, 4, 4)), 29, 0)
    for rank, cache in enumerate(imported(case, exported(case, PROMPT[:29]))):
        assert cache.add("c", PROMPT[:29]) == 24
        check(cache, case.target, rank, "c", 0, SALT)


def test_prefixes_are_hashed_anew_from_tokens_where_units_differ() -> None:
    case = Case(Side((2, 2, 4)), Side((3, 1, 4)), 29, 0)
    shards = exported(case, PROMPT[:29])
    assert [cache.add("c", PROMPT[:29]) for cache in imported(case, shards)] == [0] * 3
    for rank, cache in enumerate(imported(case, shards, tokens=PROMPT[:29])):
        assert cache.add("c", PROMPT[:29]) == 24
        check(cache, case.target, rank, "c", 0, SALT)


def test_a_unit_that_came_in_part_is_not_findable() -> None:
    case = Case(Side((1, 4, 4)), Side((1, 4, 4)), 16, 6)
    (cache,) = imported(case, exported(case, PROMPT[:16]))
    hashes = cache._sequences.hash_units(PROMPT[:16])
    assert [cache.pool.lookup([unit]) != [] for unit in hashes] == [False, False, True, True]


@pytest.mark.parametrize("forked", [False, True])
@pytest.mark.parametrize("oldest", [1, 4, 5, 6])
def test_a_unit_that_came_in_part_is_not_findable_later(oldest: int, forked: bool) -> None:
    """Its end is computed here, and its begin never was here."""
    case = Case(Side((1, 4, 4)), Side((2, 2, 2)), 6, oldest)
    for rank, cache in enumerate(imported(case, exported(case, PROMPT[:16]), tokens=PROMPT[:16])):
        if forked:
            cache.fork("a", "f")
            cache.free("a")
            # a fork announces nothing: as if it did
            cache._sequences.get("f").hashes = cache._sequences.hash_units(PROMPT[:16])
        fill(cache, case.target, rank, "f" if forked else "a", 10, SALT)
        hashes = cache._sequences.hash_units(PROMPT[:16])
        found = [cache.pool.lookup([unit]) != [] for unit in hashes]
        assert found == [False, oldest <= 4, True, True]
        assert cache.add("c", [*PROMPT[:16], 1]) == 0


def test_the_rest_of_a_prompt_is_still_announced() -> None:
    case = Case(Side((1, 4, 4)), Side((2, 2, 2)), 6, 0)
    for rank, cache in enumerate(imported(case, exported(case, PROMPT[:12]))):
        fill(cache, case.target, rank, "a", 6, SALT)
        assert cache.add("c", [*PROMPT[:12], 1]) == 12


CASE = Case(Side((2, 2, 4)), Side((3, 1, 4)), 29, 0)


def changed(shard: BlockShard, **header) -> BlockShard:
    return BlockShard(replace(shard.header, **header), shard.rows, shard.checksums)


def flipped(shard: BlockShard) -> BlockShard:
    rows = shard.rows.clone()
    rows.view(torch.uint8)[3, 1, 5] ^= 4
    return replace(shard, rows=rows)


def with_blocks_swapped(shard: BlockShard) -> BlockShard:
    rows = torch.cat([shard.rows[4:8], shard.rows[:4], shard.rows[8:]])
    return replace(shard, rows=rows, checksums=shard.checksums[[1, 0, 2, 3]])


REFUSED = {
    "a flipped bit": (lambda a, b: [flipped(a), b], "block 0 with another checksum"),
    "blocks that changed places": (
        lambda a, b: [with_blocks_swapped(a), b],
        "block 0 with another checksum",
    ),
    "a wrong checksum": (
        lambda a, b: [a, replace(b, checksums=b.checksums + 1)],
        "block 0 with another checksum",
    ),
    "the rows of the other rank": (
        lambda a, b: [a, replace(a, header=replace(b.header, cp_rank=1))],
        "the header announces",
    ),
    "a missing rank": (
        lambda a, b: [a],
        "14 tokens of the sequence are, with KV heads 0 to 1, in none of them",
    ),
    "nothing": (lambda a, b: [], "no shards"),
    "rows cut off": (lambda a, b: [replace(a, rows=a.rows[:-1]), b], "the header announces"),
    "rows of another dtype": (
        lambda a, b: [replace(a, rows=a.rows.float()), b],
        "the header announces",
    ),
    "another length": (lambda a, b: [changed(a, length=28), b], "differ in length"),
    "another length on both": (
        lambda a, b: [changed(a, length=31), changed(b, length=31)],
        "the header announces",
    ),
    "another layout": (
        lambda a, b: [changed(s, layout=InterleavedLayout(2, 2, 8)) for s in (a, b)],
        "the header announces",
    ),
    "another interleave of as many rows": (
        lambda a, b: [changed(s, layout=InterleavedLayout(2, 1, 4)) for s in (a, b)],
        "another checksum",
    ),
    "another spec": (
        lambda a, b: [changed(s, spec="MLASpec") for s in (a, b)],
        "a shard with spec=MLASpec",
    ),
    "another dtype": (
        lambda a, b: [changed(s, dtype="torch.float32") for s in (a, b)],
        "a shard with dtype=torch.float32",
    ),
    "other hashes": (
        lambda a, b: [changed(s, hashes=("00" * 16,)) for s in (a, b)],
        "another checksum",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_import_changes_nothing(name: str) -> None:
    damage, words = REFUSED[name]
    shards = damage(*exported(CASE, PROMPT[:29]))
    for rank, cache in enumerate(group(CASE.target)):
        cache.add("b", PROMPT)
        fill(cache, CASE.target, rank, "b", 40, 3.0)
        cache.free("b")  # reusable content is not evicted either
        before = snapshot(cache)
        with pytest.raises(TransferError, match=words):
            cache.import_blocks("a", shards)
        assert same(before, snapshot(cache))


def test_a_cache_of_another_model_refuses() -> None:
    shards = exported(CASE)
    layout = InterleavedLayout(1, 4, 4)
    for cache, words in (
        (PagedKVCache(GQASpec(2, 4), layout, 2, 40, dtype=torch.float64), "with planes"),
        (PagedKVCache(GQASpec(2, 3), layout, 3, 40, dtype=torch.float64), "num_layers=2"),
        (PagedKVCache(GQASpec(2, 3), layout, 2, 40), r"dtype=torch\.float64"),
    ):
        with pytest.raises(TransferError, match=words):
            cache.import_blocks("a", shards)
        assert (cache.seqs, cache.pool.num_used) == ((), 0)


def test_a_cache_that_is_full_or_has_the_name_refuses() -> None:
    shards = exported(CASE)
    for rank in range(3):
        cache = CASE.target.cache(rank, 2)
        with pytest.raises(CacheFullError, match="3 more blocks are needed and 2 of 2 are left"):
            cache.import_blocks("a", shards)
        assert (cache.seqs, cache.pool.num_available) == ((), 2)
        cache.add("a")
        with pytest.raises(ConfigError, match="the name of a sequence is unique"):
            cache.import_blocks("a", shards)


def test_ranks_that_agree_verify_only_what_they_need() -> None:
    good = exported(CASE)
    bad = replace(good[0], checksums=good[0].checksums.clone())
    bad.checksums[3] += 1  # the last block of rank 0: positions 24, 25 and 28
    asked = []

    def agree(ok: bool) -> bool:
        asked.append(ok)
        return ok

    for rank in range(3):
        cache = CASE.target.cache(rank, 40)
        if rank == 2:  # owns none of these
            cache.import_blocks("a", [bad, good[1]], agree=agree)
        else:
            with pytest.raises(TransferError, match="block 3 with another checksum"):
                cache.import_blocks("a", [bad, good[1]], agree=agree)
    assert asked == [False, False, True]


def test_a_rank_that_verified_its_part_takes_nothing_where_another_refuses() -> None:
    cache = CASE.target.cache(0, 40)
    before = snapshot(cache)
    with pytest.raises(TransferError, match="that another rank refused"):
        cache.import_blocks("a", exported(CASE), agree=lambda ok: False)
    assert same(before, snapshot(cache))


@pytest.mark.parametrize(
    ("source", "left_out"),
    [
        (Side((2, 2, 4)), [1]),  # of two target ranks, one needs nothing of it
        (Side((2, 2, 4)), [0]),
        (Side((2, 2, 4), tp=2), [0]),
        (Side((2, 2, 4), tp=2), [3]),
        (Side((1, 2, 4), tp=4, model_heads=4), [1]),
    ],
    ids=str,
)
def test_without_talking_no_rank_takes_what_another_lacks(source: Side, left_out: list) -> None:
    case = Case(source, Side((2, 2, 4), tp=2, model_heads=source.model_heads), 29, 0)
    shards = exported(case)
    given = [shard for rank, shard in enumerate(shards) if rank not in left_out]
    alone = 0
    for rank, cache in enumerate(group(case.target)):
        before, first_head = snapshot(cache), case.target.place(rank)[1]
        with pytest.raises(TransferError, match="in none of them"):
            cache.import_blocks("a", given, first_head=first_head)
        assert same(before, snapshot(cache))
        try:
            alone += cache.import_blocks("a", given, first_head=first_head, agree=bool) == 29
        except TransferError:
            assert same(before, snapshot(cache))
    assert alone, "some rank lacks nothing: it has to refuse for the others' sake"


def test_an_import_makes_a_plan_stale() -> None:
    cache = CASE.target.cache(0, 40)
    cache.add("b")
    plan = cache.plan([("b", 4)])
    cache.import_blocks("a", exported(CASE))
    with pytest.raises(Exception, match="stale"):
        cache.commit(plan)
