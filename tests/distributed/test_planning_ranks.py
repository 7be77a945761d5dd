"""The planner against live ranks: what caches allocate, layers send and models keep."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from cplayers import (
    CacheConfig,
    CacheFullError,
    CPMesh,
    DCPGQAAttention,
    DCPMLAAttention,
    InterleavedLayout,
    PagedKVCache,
    Topology,
)
from cplayers.attention import PCPPrefillAttention
from cplayers.attention.costs import Sizes
from cplayers.mesh import legal_dcp
from cplayers.planning import KVMemory, ModelShape, sizes_of, weights_of
from cplayers.planning.shape import Latent
from cplayers.planning.traffic import Chunk, decode_calls, fetch_calls, visit_calls

DTYPES = (torch.bfloat16, torch.float32)
CONFIGURATIONS = 20


@dataclass(frozen=True)
class Drawn:
    """A layer, a layout, a cache, and what it is to hold."""

    shape: ModelShape
    topology: Topology
    replicate_q: bool
    cache: CacheConfig
    dtype: torch.dtype
    context: int
    sequences: int
    combine: str


def draw(seed: int) -> Drawn:
    """A configuration on at most 4 ranks."""
    rng = random.Random(seed)
    tp, pcp = rng.choice([(1, 1), (2, 1), (1, 2), (4, 1), (2, 2), (1, 4), (3, 1), (1, 3)])
    kv_heads = rng.choice([None, 1, tp, 2 * tp])
    heads = (kv_heads or 1) * tp * rng.randint(1, 2)
    replicate_q = rng.random() < 0.4
    axes = Topology(tp=tp, pcp=pcp)
    legal = legal_dcp(axes, num_heads=heads, num_kv_heads=kv_heads, replicate_q=replicate_q)
    dcp = rng.choice(legal)
    layers = rng.randint(1, 3)
    if kv_heads is None:
        nope, rope, rank = rng.randint(1, 5), 2 * rng.randint(1, 3), rng.randint(3, 9)
        latent = Latent(rng.choice([None, 5]), rank, nope, rope)
        shape = ModelShape(
            "drawn", 8, layers, heads, None, nope + rope, rng.randint(1, 5), 8, 8, latent=latent
        )
    else:
        head_dim = 2 * rng.randint(1, 4)
        shape = ModelShape("drawn", 8, layers, heads, kv_heads, head_dim, head_dim, 8, 8)
    return Drawn(
        shape,
        Topology(tp=tp, pcp=pcp, dcp=dcp),
        replicate_q,
        CacheConfig(block_size=rng.randint(1, 9), interleave_size=rng.randint(1, 9)),
        rng.choice(DTYPES),
        rng.randint(1, 120),
        rng.randint(1, 3),
        rng.choice(["a2a", "ag_rs", "ar"]),
    )


def build_layer(drawn: Drawn, mesh: CPMesh) -> DCPGQAAttention | DCPMLAAttention:
    shape, latent = drawn.shape, drawn.shape.latent
    common: dict[str, Any] = {"layer_idx": 0, "combine": drawn.combine, "mesh": mesh}
    if latent is None:
        assert shape.num_kv_heads is not None
        layer: Any = DCPGQAAttention(
            shape.hidden_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            q_proj="tpa" if drawn.replicate_q else "gather",
            **common,
        )
    else:
        layer = DCPMLAAttention(
            shape.hidden_size,
            shape.num_heads,
            latent.q_rank,
            latent.kv_rank,
            latent.nope_dim,
            latent.rope_dim,
            shape.value_dim,
            decode="replicate_q" if drawn.replicate_q else "gather_q",
            **common,
        )
    return layer.to(drawn.dtype)


def build_cache(drawn: Drawn, layer: Any, mesh: CPMesh, num_blocks: int) -> PagedKVCache:
    layout = InterleavedLayout(
        mesh.size("dcp"), drawn.cache.interleave_size, drawn.cache.block_size
    )
    return PagedKVCache(
        layer.cache_spec,
        layout,
        drawn.shape.num_layers,
        num_blocks,
        mesh.rank("dcp"),
        drawn.dtype,
        pcp_rank=mesh.rank("pcp"),
        pcp_size=mesh.size("pcp"),
    )


def allocated(drawn: Drawn, num_blocks: int) -> tuple[int, int, int, int]:
    """Bytes of the storage on this rank, matrices of the layer, and sequences that fit."""
    mesh = CPMesh(drawn.topology)
    layer = build_layer(drawn, mesh)
    cache = build_cache(drawn, layer, mesh, num_blocks)
    storage = {
        plane.untyped_storage().data_ptr(): plane.untyped_storage().nbytes()
        for index in range(drawn.shape.num_layers)
        for plane in cache.view(index, 0, 1)
    }
    held = 0
    for name in range(drawn.sequences + 1):
        cache.add(name)
        try:
            cache.commit(cache.plan([(name, drawn.context)]))
        except CacheFullError:
            break
        held += 1
    matrices = sum(p.numel() for p in layer.parameters() if p.dim() > 1)
    return sum(storage.values()), cache.nbytes, held, matrices


@pytest.mark.parametrize("seed", range(CONFIGURATIONS))
def test_memory_is_what_the_ranks_allocate(ranks: Any, seed: int) -> None:
    drawn = draw(seed)
    topology = drawn.topology
    memory = KVMemory(
        drawn.shape, topology, drawn.cache, drawn.dtype, replicate_q=drawn.replicate_q
    )
    blocks = memory.blocks(drawn.context, drawn.sequences)
    expected = memory.nbytes(drawn.context, drawn.sequences)
    weights = weights_of(drawn.shape, topology, replicate_q=drawn.replicate_q)
    world = topology.world_size
    for storage, nbytes, held, matrices in ranks(4).run(allocated, drawn, blocks, n=world):
        assert storage == nbytes == expected > 0
        assert held == drawn.sequences
        assert matrices * drawn.shape.num_layers == weights.attention


def test_configurations_are_of_all_kinds() -> None:
    drawn = [draw(seed) for seed in range(CONFIGURATIONS)]
    assert {d.shape.latent is None for d in drawn} == {True, False}
    assert sum(d.topology.dcp > 1 for d in drawn) >= 6
    assert any(d.replicate_q and d.topology.dcp_tp > 1 for d in drawn)
    assert len({d.topology for d in drawn}) >= 8


Records = list[tuple[str, str, int]]


def sent_by(drawn: Drawn, strategy: str) -> tuple[Sizes, Records, Records]:
    """Sizes of the layer, and what it sends for a chunk over cached tokens and when decoding."""
    mesh = CPMesh(drawn.topology)
    layer = build_layer(drawn, mesh)
    layer.prefill = PCPPrefillAttention(strategy, mesh=mesh)
    cache = build_cache(drawn, layer, mesh, 200)
    records = []
    cache.add("a")
    cache.commit(cache.plan([("a", CACHED)]))
    for new in (CHUNK, 1):
        plan = cache.plan([("a", new)])
        x = torch.ones(plan.num_rows, drawn.shape.hidden_size, dtype=drawn.dtype)
        latent = drawn.shape.latent
        angles = x.new_ones(plan.num_rows, latent.rope_dim if latent else drawn.shape.head_dim)
        with torch.no_grad(), mesh.traffic.capture() as log:
            layer(x, (angles, angles), cache, plan)
        cache.commit(plan)
        records.append([tuple(record) for record in log if record.axis != "tp"])
    return layer.sizes, records[0], records[1]


CACHED, CHUNK = 64, 32  # shares of both are even
EXCHANGE = ("pcp", "all_to_all")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("strategy", ["gather_q", "gather_kv"])
@pytest.mark.parametrize("combine", ["a2a", "ag_rs", "ar"])
@pytest.mark.parametrize(
    ("topology", "replicate_q", "kv_heads"),
    [
        (Topology(tp=4, dcp=4), False, 1),
        (Topology(tp=4, dcp=2), True, 2),
        (Topology(tp=2, pcp=2, dcp=2), False, 2),
        (Topology(tp=2, pcp=2, dcp=4), False, None),
        (Topology(tp=2, pcp=2, dcp=4), True, None),
    ],
    ids=str,
)
def test_layers_send_what_is_predicted(
    ranks: Any,
    topology: Topology,
    replicate_q: bool,
    kv_heads: int | None,
    combine: str,
    strategy: str,
) -> None:
    if kv_heads is None:
        latent = Latent(None, 6, 3, 4)
        shape = ModelShape("mla", 8, 1, 4, None, 7, 5, 8, 8, latent=latent)
    else:
        shape = ModelShape("gqa", 8, 1, 4, kv_heads, 6, 6, 8, 8)
    cache = CacheConfig(4, 1)
    drawn = Drawn(shape, topology, replicate_q, cache, torch.float32, 1, 1, combine)
    sizes = sizes_of(shape, topology, dtype=torch.float32, replicate_q=replicate_q, combine=combine)
    chunk = Chunk.of(topology, CHUNK)
    predicted = (
        visit_calls(sizes, topology, chunk)
        if strategy == "gather_q"
        else fetch_calls(sizes, topology, chunk, CACHED, 16384)
    )
    calls = [call[:3] for call in predicted]
    for theirs, prompt, decode in ranks(4).run(sent_by, drawn, strategy, n=4):
        assert theirs == sizes
        assert decode == [call[:3] for call in decode_calls(sizes, topology, 1)]
        # zigzag and interleave share out what the plan exchanges less evenly than predicted
        exchanged, evenly = exchanges(prompt), exchanges(calls)
        assert evenly <= exchanged <= 2 * evenly
        assert sorted(rest(prompt)) == sorted(rest(calls))


def exchanges(records: Records) -> int:
    """Bytes of new keys that travel to their owners."""
    return sum(sent for axis, operation, sent in records if (axis, operation) == EXCHANGE)


def rest(records: Records) -> Records:
    return [record for record in records if record[:2] != EXCHANGE]
