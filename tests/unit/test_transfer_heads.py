"""KV heads that are spread over ranks: all of them come, or none does; and how rows are cut."""

from __future__ import annotations

import pytest
from transfer_cases import Case, Side, check, exported, group, same, snapshot

from cplayers.cache import InterleavedLayout, MLASpec, PagedKVCache
from cplayers.errors import ConfigError, TransferError


@pytest.mark.parametrize(
    ("source", "kept"),
    [
        (Side((2, 2, 4), tp=2), [0, 1]),
        (Side((1, 2, 4), tp=2), [0]),
        (Side((1, 2, 4), tp=4, model_heads=4), [0, 1]),
        (Side((1, 2, 4), tp=4, model_heads=4), [0, 1, 2]),
        (Side((2, 4, 4), tp=2, copies=2, model_heads=4), [0, 1, 4, 5]),
    ],
    ids=str,
)
def test_the_last_heads_of_a_model_are_missed_by_all_ranks(source: Side, kept: list[int]) -> None:
    """Also by ranks that need none of them, where the shards say how many there are."""
    case = Case(source, Side((2, 2, 4), tp=2, model_heads=source.model_heads), 29, 0)
    shards = exported(case, model_heads=source.model_heads)
    for rank, cache in enumerate(group(case.target)):
        before, first_head = snapshot(cache), case.target.place(rank)[1]
        with pytest.raises(TransferError, match=f"KV heads 0 to {source.model_heads - 1}"):
            cache.import_blocks("a", [shards[i] for i in kept], first_head=first_head)
        assert same(before, snapshot(cache))
        assert cache.import_blocks("a", shards, first_head=first_head) == 29
        assert check(cache, case.target, rank, "a", 0, 0.5)


def test_shards_say_alike_how_many_heads_there_are() -> None:
    case = Case(Side((2, 2, 4)), Side((1, 4, 4)), 29, 0)
    mixed = [exported(case, model_heads=heads)[rank] for rank, heads in enumerate((2, None))]
    (cache,) = group(case.target)
    with pytest.raises(TransferError, match="differ in model_heads"):
        cache.import_blocks("a", mixed)


@pytest.mark.parametrize(
    ("first_head", "model_heads"), [(-1, None), (0, 1), (3, 4), (0, 0), (0, 2**40)]
)
def test_heads_that_a_model_cannot_have_are_refused(
    first_head: int, model_heads: int | None
) -> None:
    (cache,) = group(Side((1, 4, 4)))
    cache.add("a")
    with pytest.raises(ConfigError, match=f"first_head={first_head}, model_heads={model_heads} f"):
        cache.export_blocks("a", first_head=first_head, model_heads=model_heads)
    assert cache.export_blocks("a", first_head=2, model_heads=4).header.holding.heads == (2, 4)


def test_latents_cut_elsewhere_are_refused() -> None:
    """Rows are as wide, and their values are other ones."""
    caches = [
        PagedKVCache(MLASpec(*dims), InterleavedLayout(1, 4, 4), 2, 8) for dims in [(5, 2), (4, 3)]
    ]
    caches[0].add("a")
    caches[0].commit(caches[0].plan([("a", 5)]))
    shard = caches[0].export_blocks("a")
    before = snapshot(caches[1])
    with pytest.raises(TransferError, match=r"values of 5 features: .* with values of 4"):
        caches[1].import_blocks("a", [shard])
    assert same(before, snapshot(caches[1]))
