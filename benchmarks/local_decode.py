"""Attention of one token to a local cache, beside a plain read of the cache: what it cannot beat.

Decoding reads every key and value once and does few multiplications on each, so that the time of
reading them is the limit. In this process, with several threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.nn import functional

from benchmarks.bench import Bench
from benchmarks.contexts import filled, one_token, planes, reads
from benchmarks.results import READ, Bar, Case, find
from benchmarks.settings import LocalDecode
from benchmarks.sites import Contestant, Here
from cplayers import GQASpec, InterleavedLayout, PagedKVCache
from cplayers.attention import CachedLayer, Scoring, attend_cached

TITLE = "Decode attention of one token, local cache"
NEAR, FAR = "cplayers, consecutive blocks", "cplayers, shuffled blocks"


def contestants(keys: int, heads: tuple[int, int, int], block_size: int) -> dict[str, Contestant]:
    num, num_kv, dim = heads
    spec, layout = GQASpec(num_kv, dim), InterleavedLayout(1, block_size, block_size)
    near, far = (filled(spec, layout, keys, shuffled=shuffled) for shuffled in (False, True))
    q = 2 * torch.randn(1, num, dim, generator=torch.Generator().manual_seed(3))
    k, v = (plane.unsqueeze(0) for plane in planes(near))
    query = q.transpose(0, 1).unsqueeze(0)  # [1, N, 1, H]
    scale = dim**-0.5

    def sdpa() -> torch.Tensor:
        return functional.scaled_dot_product_attention(query, k, v, scale=scale, enable_gqa=True)

    return {
        NEAR: decode(near, q, scale),
        FAR: decode(far, q, scale),
        "torch sdpa, contiguous keys": Contestant(sdpa, lambda out: out[0, :, 0]),
        **reads(planes(near)),
    }


def decode(cache: PagedKVCache, q: torch.Tensor, scale: float) -> Contestant:
    """``q`` `[1, N, H]` over the whole cache, in a step that is planned once for all layers."""
    plan = one_token(cache)
    last = [torch.ones(1, plane.heads, plane.dim) for plane in cache.spec.planes]
    cache.write(plan, 0, plan.decode_writes, *last)
    layer, scoring = CachedLayer(cache, plan, 0), Scoring(scale)
    return Contestant(lambda: attend_cached(q, layer, scoring), lambda partial: partial.out[0])


def run(bench: Bench, settings: LocalDecode) -> Iterator[Case]:
    heads = settings.heads.num, settings.heads.num_kv, settings.heads.dim
    for keys in settings.keys:
        site = Here(bench.threads, contestants, keys, heads, settings.block_size)
        case = bench.case({"keys": keys}, [site], READ, bar=keys == settings.bar_keys)
        size = 2 * keys * heads[1] * heads[2] * 4  # keys and values in fp32
        case.add_rates(dict.fromkeys(case.timings, size), "B")
        yield case


def bars(cases: Sequence[Case], settings: LocalDecode) -> list[Bar]:
    case, size = find(cases, keys=settings.bar_keys), f"{settings.bar_keys:,} keys"
    return [
        Bar(f"{name} over a plain read, {size}", case and case.ratio(name), limit)
        for name, limit in ((NEAR, 1.25), (FAR, 2.0))
    ]
