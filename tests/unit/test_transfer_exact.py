"""Every bit of every dtype, and sequences that share blocks: what comes is what was there."""

from __future__ import annotations

import pytest
import torch
import transfer_cases
from transfer_cases import SALT, Case, Side, check, exported, fill, group

from cplayers import CPMesh, Topology
from cplayers.cache import GQASpec, InterleavedLayout, MLASpec, PagedKVCache, load_shard, save_shard
from cplayers.serving import Passage, hand_over

LENGTH = 21


def bits(cache: PagedKVCache, layer: int, position: int, heads: slice) -> list[bytes]:
    """Of what is stored of a token, a plane each, found by plain counting."""
    layout, table = cache.layout, cache.block_table("a")
    turn, offset = divmod(position, layout.interleave_size)
    assert turn % layout.cp_size == cache.view_of_rank.cp_rank
    index = turn // layout.cp_size * layout.interleave_size + offset
    slot = table[index // layout.block_size] * layout.block_size + index % layout.block_size
    planes = cache.view(layer, slot, 1)
    return [bytes(p[0, heads].contiguous().view(torch.uint8).flatten().tolist()) for p in planes]


def by_objects(source: PagedKVCache, target: PagedKVCache, head: int, folder) -> None:
    target.import_blocks("a", [source.export_blocks("a")], first_head=head)


def by_file(source: PagedKVCache, target: PagedKVCache, head: int, folder) -> None:
    save_shard(source.export_blocks("a"), folder / "a")
    target.import_blocks("a", [load_shard(folder / "a")], first_head=head)


def by_group(source: PagedKVCache, target: PagedKVCache, head: int, folder) -> None:
    hand_over(CPMesh(Topology()), "pcp", [Passage("a", source, target, target_head=head)])


@pytest.mark.parametrize("way", [by_objects, by_file, by_group])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head", [None, 0, 1])
def test_every_bit_travels(way, dtype: torch.dtype, head: int | None, tmp_path) -> None:
    """NaN of any kind and zeros with a sign among them."""
    spec = MLASpec(5, 2) if head is None else GQASpec(2, 3)
    source = PagedKVCache(spec, InterleavedLayout(1, 4, 4), 2, 12, dtype=dtype)
    made = torch.Generator().manual_seed(head or 0)
    for layer in range(2):
        for plane in source.storage.stores(layer):
            noise = torch.randint(256, plane.view(torch.uint8).shape, generator=made)
            plane.view(torch.uint8).copy_(noise.to(torch.uint8))
    source.add("a")
    source.commit(source.plan([("a", LENGTH)]))
    spec = spec if head is None else GQASpec(1, 3)
    target = PagedKVCache(spec, InterleavedLayout(3, 2, 5), 2, 12, 1, dtype)
    way(source, target, head or 0, tmp_path)
    heads = slice(None) if head is None else slice(head, head + 1)
    own = [position for position in range(LENGTH) if position // 2 % 3 == 1]
    assert len(own) == 7
    for layer in range(2):
        for position in own:
            expected = bits(source, layer, position, heads)
            assert bits(target, layer, position, slice(None)) == expected


def test_sequences_that_share_blocks_are_apart_after_the_journey() -> None:
    case = Case(Side((2, 2, 4)), Side((1, 4, 8)), 0, 0)
    prompt = list(range(13))
    shards = []
    for rank, cache in enumerate(group(case.source)):
        cache.add("a", prompt)
        fill(cache, case.source, rank, "a", 13, SALT)
        cache.fork("a", "b")
        fill(cache, case.source, rank, "a", 5, SALT)
        fill(cache, case.source, rank, "b", 9, 0.75)
        shards.append({seq: cache.export_blocks(seq) for seq in "ab"})
        cache.free("a")  # neither what is in the cache nor what was exported changes
        check(cache, case.source, rank, "b", 13, 0.75)
    (cache,) = group(case.target)
    for seq, length in (("a", 18), ("b", 22)):
        assert cache.import_blocks(seq, [shard[seq] for shard in shards]) == length
    assert not set(cache.block_table("a")) & set(cache.block_table("b"))
    check(cache, case.target, 0, "a", 0, SALT)
    check(cache, case.target, 0, "b", 13, 0.75)
    assert cache.add("c", [*prompt, 1]) == 8  # both brought it; it is found once
    cache.free("a")
    check(cache, case.target, 0, "c", 0, SALT)
    cache.truncate("b", 13)
    check(cache, case.target, 0, "b", 0, SALT)


@pytest.mark.parametrize("seed", range(24))
def test_what_is_found_is_whole(seed: int) -> None:
    """Of a prompt that came in part, by its window or its length, and went on here."""
    case = transfer_cases.draw(seed, most_tokens=60)
    case = case._replace(oldest=min(case.length, seed % 3))
    prompt = list(range(case.length + 11))
    shards = exported(case, prompt)
    for rank, cache in enumerate(group(case.target)):
        first_head = case.target.place(rank)[1]
        cache.import_blocks("a", shards, first_head=first_head, tokens=prompt)
        fill(cache, case.target, rank, "a", 11, SALT)
        found = len(prompt) // cache.layout.unit_tokens * cache.layout.unit_tokens
        assert cache.add("b", [*prompt, 1]) == (0 if case.oldest else found)
        check(cache, case.target, rank, "b", 0, SALT)
