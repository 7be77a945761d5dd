"""A chunk of a prompt over a cached context, both spread over ranks: which strategy, and when?

Queries travel to the keys (gather_q), or keys to the queries (gather_kv, ring). What the former
sends does not grow with the context. In one process, sdpa with a mask does the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch.nn import functional

from benchmarks.bench import Bench
from benchmarks.contexts import SEQ, filled, planes
from benchmarks.results import Bar, Case
from benchmarks.settings import ChunkPrefill
from benchmarks.sites import Contestant, Here, OnRanks
from cplayers import CPMesh, GQASpec, InterleavedLayout, PCPPrefillAttention, Topology
from cplayers.attention import CachedLayer

TITLE = "Prefill attention of a chunk over a cached context"
STRATEGIES = ("gather_q", "gather_kv", "ring")
ONE = "one process, sdpa with a mask"


def inputs(new: int, heads: tuple[int, int, int]) -> list[torch.Tensor]:
    """q, k, v of the chunk, `[new, heads, dim]`."""
    generator = torch.Generator().manual_seed(5)
    num, num_kv, dim = heads
    return [torch.randn(new, n, dim, generator=generator) for n in (num, num_kv, num_kv)]


def on_ranks(
    n: int, keys: int, new: int, heads: tuple[int, int, int], block_size: int
) -> dict[str, Contestant]:
    mesh = CPMesh(Topology(pcp=n, dcp=n))
    layout = InterleavedLayout(n, block_size, block_size)
    cache = filled(GQASpec(*heads[1:]), layout, keys, mesh, new=new)
    plan = cache.plan([(SEQ, new)], max_decode_tokens=0)
    q, k, v = (t[plan.tokens] for t in inputs(new, heads))
    found = {}
    for strategy in STRATEGIES if n > 1 else STRATEGIES[1:2]:  # on one rank they are the same
        attention = PCPPrefillAttention(strategy, mesh=mesh)
        call = partial(
            attention,
            *(q, k, v, plan.prefill),
            scale=heads[2] ** -0.5,
            cached=CachedLayer(cache, plan, 0),
        )
        found[f"cplayers, {strategy}"] = Contestant(call, lambda found: found.out, plan.tokens)
    return found


def in_one_process(
    keys: int, new: int, heads: tuple[int, int, int], block_size: int
) -> dict[str, Contestant]:
    layout = InterleavedLayout(1, block_size, block_size)
    cache = filled(GQASpec(*heads[1:]), layout, keys, new=new)
    q, *rows = inputs(new, heads)
    near = planes(cache)
    for plane, last in zip(near, rows, strict=True):
        plane[:, keys - new : keys] = last.transpose(0, 1)
    k, v = (plane[:, :keys].unsqueeze(0) for plane in near)
    mask = torch.ones(new, keys, dtype=torch.bool).tril(keys - new)
    sdpa = functional.scaled_dot_product_attention
    query, grouped = q.transpose(0, 1).unsqueeze(0), heads[0] != heads[1]
    run = partial(sdpa, query, k, v, attn_mask=mask, enable_gqa=grouped)
    return {ONE: Contestant(run, lambda out: out[0].transpose(0, 1))}


def run(bench: Bench, settings: ChunkPrefill) -> Iterator[Case]:
    heads = settings.heads.num, settings.heads.num_kv, settings.heads.dim
    for ranks in settings.ranks:
        for keys in settings.keys:
            size = keys, settings.new, heads, settings.block_size
            sites = [
                OnRanks(bench.pool, ranks, on_ranks, *size),
                Here(bench.threads, in_one_process, *size),
            ]
            case = bench.case({"keys": keys, "ranks": ranks}, sites, ONE)
            seen = settings.new * (2 * keys - settings.new + 1) / 2  # by all rows together
            work = 4 * seen * settings.heads.num * settings.heads.dim
            case.add_rates(dict.fromkeys(case.timings, work), "FLOP")
            yield case


def bars(cases: Sequence[Case], settings: ChunkPrefill) -> list[Bar]:
    return []
