"""One token over cached latents (MLA), queries in the latent: as fast as a product of matrices?

All heads read the same row per token, so that each byte is used 2 * heads times: the limit is the
machine's rate in products of matrices, not reading. On ranks the step takes queries of own heads,
gathers those of the group, attends, and combines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch

from benchmarks.bench import Bench
from benchmarks.contexts import filled, one_token, planes, reads
from benchmarks.local_decode import decode
from benchmarks.results import READ, Bar, Case, find
from benchmarks.settings import MLADecode
from benchmarks.sites import Contestant, Here, OnRanks
from cplayers import CPMesh, InterleavedLayout, MLASpec, Topology
from cplayers.attention import CachedLayer, Scoring, Visit, visit
from cplayers.ops import Partial

TITLE = "Decode attention of one token in the latent (MLA)"
OURS, PRODUCTS, GEMM = "cplayers", "two products and a softmax", "torch.mm of squares"


def queries(num_heads: int, width: int) -> torch.Tensor:
    return 0.7 * torch.randn(1, num_heads, width, generator=torch.Generator().manual_seed(3))


def here(
    keys: int, num_heads: int, latent: int, rope: int, block_size: int, gemm: int
) -> dict[str, Contestant]:
    cache = filled(MLASpec(latent, rope), InterleavedLayout(1, block_size, block_size), keys)
    q, scale = queries(num_heads, latent + rope), (latent + rope) ** -0.5
    (rows,) = planes(cache)
    square = [torch.randn(gemm, gemm) for _ in range(2)]
    ours = decode(cache, q, scale)

    def products() -> torch.Tensor:
        # Keys on the left, which the matrix library reads fastest.
        weights = (rows[0] @ q[0].T).mul_(scale).softmax(0)
        return weights.T @ rows[0, :, :latent]

    return {
        OURS: ours,
        PRODUCTS: Contestant(products, lambda out: out),
        GEMM: Contestant(partial(torch.mm, *square)),
        **reads([rows]),
    }


def on_ranks(
    n: int, keys: int, num_heads: int, latent: int, rope: int, block_size: int
) -> dict[str, Contestant]:
    mesh = CPMesh(Topology(tp=n, dcp=n))
    layout = InterleavedLayout(n, block_size, block_size)
    cache = filled(MLASpec(latent, rope), layout, keys, mesh)
    width = latent + rope
    own = torch.arange(num_heads).chunk(n)[mesh.rank("tp")]
    q = queries(num_heads, width)[:, own]
    cached = CachedLayer(cache, one_token(cache), 0)
    row, scoring = (torch.ones(1, 1, width),), Scoring(width**-0.5)

    def step() -> Partial:
        return visit(q, lambda: row, cached, scoring, Visit(), mesh)

    return {
        OURS: Contestant(step, lambda partial: partial.out[0], own),
        **reads(planes(cache)),
    }


def run(bench: Bench, settings: MLADecode) -> Iterator[Case]:
    shape = settings.num_heads, settings.latent, settings.rope, settings.block_size
    for keys in settings.keys:
        site = Here(bench.threads, here, keys, *shape, settings.gemm)
        case = bench.case({"keys": keys}, [site], GEMM, bar=keys == settings.bar_keys)
        case.add_rates(work(keys, settings), "FLOP")
        yield case
    for ranks in settings.ranks:
        for keys in settings.keys:
            site = OnRanks(bench.pool, ranks, on_ranks, keys, *shape)
            case = bench.case({"keys": keys, "ranks": ranks}, [site], READ)
            case.add_rates(work(keys, settings), "FLOP")
            yield case


def work(keys: int, settings: MLADecode) -> dict[str, float]:
    """Floating point operations by contestant."""
    width = 2 * settings.latent + settings.rope  # of a key and its value
    attention = 2 * settings.num_heads * keys * width
    return {OURS: attention, PRODUCTS: attention, GEMM: 2 * settings.gemm**3}


def bars(cases: Sequence[Case], settings: MLADecode) -> list[Bar]:
    case, size = find(cases, keys=settings.bar_keys), f"{settings.bar_keys:,} keys"
    ms = share = None
    if case is not None:
        ms = case.timings[OURS].median * 1e3
        flops = work(settings.bar_keys, settings)
        ours, gemm = (flops[name] / case.timings[name].median for name in (OURS, GEMM))
        share = ours / gemm * 100
    return [
        Bar(f"MLA decode in the latent, {size}", ms, settings.bar_ms, "ms"),
        Bar(f"MLA decode, share of torch.mm's rate, {size}", share, 60, "%", at_least=True),
    ]
