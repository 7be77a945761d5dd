"""Causal attention of a whole prompt spread over ranks, beside two rings and one process.

The work is arithmetic and grows with the square of the prompt. n ranks with one thread each should
take as long as one process with n threads; on more ranks than the machine has cores they share
them. The rings are torch's own (zigzag shares, as here) and that of ring-attention-pytorch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional

from benchmarks import peers
from benchmarks.bench import Bench
from benchmarks.results import Bar, Case, find
from benchmarks.settings import Prefill
from benchmarks.sites import Contestant, Here, OnRanks
from cplayers import CPMesh, GQASpec, InterleavedLayout, PagedKVCache, PCPPrefillAttention, Topology

TITLE = "Prefill attention of a whole prompt"
STRATEGIES = ("gather_kv", "ring")
OURS = "cplayers"
TORCH, LUCIDRAINS, ONE = "torch ring", "lucidrains ring", "one process, sdpa"


def inputs(tokens: int, heads: tuple[int, int, int]) -> list[Tensor]:
    """q, k, v of all tokens, `[tokens, heads, dim]`."""
    generator = torch.Generator().manual_seed(5)
    num, num_kv, dim = heads
    return [torch.randn(tokens, n, dim, generator=generator) for n in (num, num_kv, num_kv)]


def on_ranks(
    n: int, tokens: int, heads: tuple[int, int, int], lucidrains: bool
) -> dict[str, Contestant]:
    num, num_kv, dim = heads
    mesh = CPMesh(Topology(pcp=n))
    at = {"pcp_rank": mesh.rank("pcp"), "pcp_size": n}
    layout = InterleavedLayout(1, 16, 16)
    cache = PagedKVCache(GQASpec(num_kv, dim), layout, 1, layout.blocks(tokens), **at)
    cache.add("prompt")
    plan = cache.plan([("prompt", tokens)])
    whole = inputs(tokens, heads)
    q, k, v = (t[plan.tokens] for t in whole)
    scale, found = dim**-0.5, dict[str, Contestant]()
    for strategy in STRATEGIES if n > 1 else STRATEGIES[:1]:  # on one rank they are the same
        attention = PCPPrefillAttention(strategy, mesh=mesh)
        call = partial(attention, q, k, v, plan.prefill, scale=scale)
        found[f"{OURS}, {strategy}"] = Contestant(call, lambda partial: partial.out, plan.tokens)
    if n > 1:
        group = num // num_kv  # torch's ring has one head of keys for each of queries
        near = [
            t.transpose(0, 1).unsqueeze(0).contiguous()
            for t in (q, *(t.repeat_interleave(group, 1) for t in (k, v)))
        ]
        found[TORCH] = Contestant(
            partial(peers.torch_ring, *near, scale), lambda out: out[0].transpose(0, 1), plan.tokens
        )
    if lucidrains:
        ring = peers.lucidrains().ring_flash_attn
        place = torch.arange(tokens).chunk(n)[mesh.rank("pcp")]
        own = [t[place].unsqueeze(0) for t in whole]
        # Its query head n reads KV head n % K; here it is n // (N / K).
        own[0] = rearrange(own[0], "b t (k g) h -> b t (g k) h", k=num_kv)
        found[LUCIDRAINS] = Contestant(
            partial(ring, *own, causal=True, ring_reduce_col=True),
            lambda out: rearrange(out[0], "t (g k) h -> t (k g) h", k=num_kv),
            place,
        )
    return found


def in_one_process(tokens: int, heads: tuple[int, int, int]) -> dict[str, Contestant]:
    q, k, v = (t.transpose(0, 1).unsqueeze(0).contiguous() for t in inputs(tokens, heads))
    sdpa = functional.scaled_dot_product_attention
    run = partial(sdpa, q, k, v, is_causal=True, enable_gqa=heads[0] != heads[1])
    return {ONE: Contestant(run, lambda out: out[0].transpose(0, 1))}


def run(bench: Bench, settings: Prefill) -> Iterator[Case]:
    heads = settings.heads.num, settings.heads.num_kv, settings.heads.dim
    for ranks in settings.ranks:
        for tokens in settings.tokens:
            bar = tokens == settings.bar_tokens and ranks == settings.bar_ranks
            notes = {}
            if ranks > 1 and not peers.has_lucidrains():
                notes[LUCIDRAINS] = peers.MISSING
            elif ranks > 1 and not bar and tokens > settings.slow_tokens:
                notes[LUCIDRAINS] = f"too slow for more than {settings.slow_tokens:,} tokens"
            lucidrains = ranks > 1 and not notes
            sites = [
                OnRanks(bench.pool, ranks, on_ranks, tokens, heads, lucidrains),
                Here(bench.threads, in_one_process, tokens, heads),
            ]
            case = bench.case({"keys": tokens, "ranks": ranks}, sites, ONE, notes, bar=bar)
            work = 2 * tokens * (tokens + 1) * settings.heads.num * settings.heads.dim
            case.add_rates(dict.fromkeys(case.timings, work), "FLOP")
            yield case


def bars(cases: Sequence[Case], settings: Prefill) -> list[Bar]:
    case = find(cases, keys=settings.bar_tokens, ranks=settings.bar_ranks)
    best = case.fastest(OURS) if case else None
    name = best or OURS
    size = f"{settings.bar_tokens:,} tokens, {settings.bar_ranks} ranks"
    missing = "" if peers.has_lucidrains() else peers.MISSING
    return [
        Bar(
            f"{name}, over {peer}, {size}",
            case.ratio(best, peer) if case and best else None,
            limit,
            why=missing if peer == LUCIDRAINS else "",
        )
        for peer, limit in ((TORCH, 1.05), (ONE, 1.1), (LUCIDRAINS, 0.1))
    ]
