"""head_shard against dealing the heads one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cplayers.attention import head_shard
from cplayers.errors import ConfigError
from cplayers.mesh import Topology, validate


def topologies(ranks: int) -> Iterator[Topology]:
    for tp in range(1, ranks + 1):
        for pcp in range(1, ranks // tp + 1):
            for dcp in Topology(tp=tp, pcp=pcp).possible_dcp():
                yield Topology(tp=tp, pcp=pcp, dcp=dcp)


def accepts(topology: Topology, heads: int, kv_heads: int, replicate_q: bool) -> bool:
    try:
        validate(
            topology,
            num_heads=heads,
            num_kv_heads=kv_heads,
            block_size=1,
            interleave_size=1,
            replicate_q=replicate_q,
        )
    except ConfigError:
        return False
    return True


def check(topology: Topology, heads: int, kv_heads: int, replicate_q: bool) -> None:
    """Every rank of a topology, each from its own place alone."""
    case = f"{topology}, {heads} heads, {kv_heads} KV heads, replicate_q={replicate_q}"
    reads = [head // (heads // kv_heads) for head in range(heads)]  # KV head of each query head
    shards = {
        rank: head_shard(
            topology, topology.rank_in(rank, "tp"), heads, kv_heads, replicate_q=replicate_q
        )
        for rank in range(topology.world_size)
    }
    for group in topology.groups("tp"):
        owned = [head for rank in group for head in range(*shards[rank].own)]
        assert owned == list(range(heads)), case
        stored = {head for rank in group for head in range(*shards[rank].kv)}
        assert stored == set(range(kv_heads)), case
    for group in topology.groups("dcp"):
        assert len({shards[rank].kv for rank in group}) == 1, case
        assert len({shards[rank].group for rank in group}) == 1, case
        owned_by_group = {head for rank in group for head in range(*shards[rank].own)}
        assert owned_by_group == set(range(*shards[group[0]].group)), case
    for rank, shard in shards.items():
        stored_here, attends = list(range(*shard.kv)), list(range(*shard.group))
        own = list(range(*shard.own))
        assert len(own) == shard.num_own == heads // topology.tp
        assert len(attends) == shard.num_group
        assert len(stored_here) == shard.num_kv
        # Attention lets local query head i read local KV head i // (local heads / local KV heads).
        each, rest = divmod(len(attends), len(stored_here))
        assert rest == 0, case
        local = [stored_here[i // each] for i in range(len(attends))]
        assert local == [reads[head] for head in attends], f"{case}, rank {rank}"
        assert [stored_here[i] for i in shard.kv_of_own()] == [reads[head] for head in own], case


@pytest.mark.parametrize("replicate_q", [False, True], ids=["gather", "tpa"])
def test_every_legal_spread_of_heads_over_up_to_16_ranks(replicate_q: bool) -> None:
    checked = 0
    for topology in topologies(16):
        for heads in range(topology.tp, 33, topology.tp):
            for kv_heads in (n for n in range(1, heads + 1) if heads % n == 0):
                if accepts(topology, heads, kv_heads, replicate_q):
                    check(topology, heads, kv_heads, replicate_q)
                    checked += 1
    assert checked > 1000


def test_query_heads_read_kv_heads_by_their_global_index() -> None:
    """SGLang 34161 and 32858: K/V replicated, 32 query and 2 KV heads, TP 4, DCP 4."""
    topology = Topology(tp=4, dcp=4)
    shards = [head_shard(topology, rank, 32, 2, replicate_q=True) for rank in range(4)]
    assert [shard.own for shard in shards] == [(0, 8), (8, 16), (16, 24), (24, 32)]
    assert {(shard.group, shard.kv) for shard in shards} == {((0, 32), (0, 2))}
    assert [set(shard.kv_of_own()) for shard in shards] == [{0}, {0}, {1}, {1}]
    check(topology, 32, 2, True)


def test_the_worked_example() -> None:
    shard = head_shard(Topology(tp=4, dcp=2), 1, 8, 2, replicate_q=False)
    assert (shard.own, shard.group, shard.kv) == ((2, 4), (0, 4), (0, 1))


def test_a_group_never_spans_ranks_of_different_kv_heads() -> None:
    """TP 6, 2 KV heads, DCP 2: the group [2, 3] would. It is refused, and only for that reason."""
    assert not accepts(Topology(tp=6, dcp=2), 12, 2, False)
    shards = [head_shard(Topology(tp=6, dcp=2), rank, 12, 2, replicate_q=False) for rank in (2, 3)]
    assert shards[0].kv != shards[1].kv
    assert accepts(Topology(tp=6, dcp=3), 12, 2, False)
