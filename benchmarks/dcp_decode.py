"""One token over a cache spread over ranks, up to the output projection, beside a plain read.

Each of n ranks, with one thread, holds an n-th of the keys and projects all query heads
(`TPAQProj`), so that nothing but partial results travels. The limits are reads by all ranks at the
same time: of their shards, and of their shards and the weights of the projections. The peer is tree
attention of ring-attention-pytorch, on the same shards.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import peers
from benchmarks.bench import Bench
from benchmarks.contexts import filled, one_token, planes, reads
from benchmarks.results import READ, Bar, Case, find
from benchmarks.settings import DCPDecode
from benchmarks.sites import Contestant, OnRanks
from cplayers import CPMesh, DCPGQAAttention, GQASpec, InterleavedLayout, Topology
from cplayers.attention import CachedLayer, Visit, visit

TITLE = "Decode step of one token before o_proj, cache spread over ranks"
STEP, LAYER = "cplayers, from q, k, v on", "cplayers, from hidden states on"
WEIGHTS = f"{READ} with weights"
TREE, TREE_PACKED = "lucidrains tree, keys repeated", "lucidrains tree, rows packed"


def contestants(
    n: int, keys: int, hidden_size: int, heads: tuple[int, int, int], block_size: int, tree: bool
) -> dict[str, Contestant]:
    num, num_kv, dim = heads
    mesh = CPMesh(Topology(tp=n, dcp=n))
    torch.manual_seed(3)
    layer = DCPGQAAttention(hidden_size, num, num_kv, dim, layer_idx=0, q_proj="tpa", mesh=mesh)
    layout = InterleavedLayout(n, block_size, block_size)
    cache = filled(GQASpec(num_kv, dim), layout, keys, mesh)
    plan = one_token(cache)
    x = 3 * torch.randn(1, hidden_size)
    cos, sin = torch.ones(1, dim), torch.zeros(1, dim)  # the step is the same wherever it stands
    q, k, v = (
        projection(x).unflatten(-1, (-1, dim))
        for projection in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    cache.write(plan, 0, plan.decode_writes, k, v)  # as every step does; peers copy it here
    cached, how = CachedLayer(cache, plan, 0), Visit(layer.combine, replicated=True)
    own = torch.arange(*layer.heads.own)
    before = _BeforeOutput(layer)

    def step() -> Any:
        return visit(q, lambda: (k, v), cached, layer.scoring, how, mesh)

    shards = planes(cache)
    weights = [layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]
    with_weights = reads([*shards, *(weight.detach() for weight in weights)])
    return {
        STEP: Contestant(step, lambda partial: partial.out[0], own),
        LAYER: Contestant(
            lambda: layer(x, (cos, sin), cache, plan),
            lambda _: before.seen.view(-1, dim),
            own,
            lambda: before.at,
        ),
        **(_tree(q, shards, layer.scoring.scale) if tree else {}),
        **reads(shards),
        **{name.replace(READ, WEIGHTS): read for name, read in with_weights.items()},
    }


class _BeforeOutput:
    """What reaches o_proj, and when."""

    def __init__(self, layer: DCPGQAAttention) -> None:
        self.seen, self.at = torch.empty(0), 0.0
        layer.o_proj.register_forward_pre_hook(self)

    def __call__(self, _: Any, args: tuple[Tensor]) -> None:
        self.seen, self.at = args[0], time.perf_counter()


def _tree(q: Tensor, shards: list[Tensor], scale: float) -> dict[str, Contestant]:
    """As its signature has it, keys of as many heads as queries; and the rows of a group packed.

    The latter reads keys as often as there are KV heads only. No caller of the package does so.
    """
    tree, dim = peers.lucidrains().tree_attn_decode, q.shape[-1]
    q = q * (scale * dim**0.5)  # it scales by dim ** -0.5
    num_kv, group = len(shards[0]), q.shape[1] // len(shards[0])
    k, v = (shard.unsqueeze(0) for shard in shards)
    more_k, more_v = (t.repeat_interleave(group, 1) for t in (k, v))
    one, packed = q.transpose(0, 1).unsqueeze(0), q.view(1, num_kv, group, dim)
    return {
        TREE: Contestant(
            lambda: tree(one, more_k, more_v, shard_kv_seq=False), lambda out: out[0, :, 0]
        ),
        TREE_PACKED: Contestant(
            lambda: tree(packed, k, v, shard_kv_seq=False), lambda out: out.view(-1, dim)
        ),
    }


def run(bench: Bench, settings: DCPDecode) -> Iterator[Case]:
    heads = settings.heads.num, settings.heads.num_kv, settings.heads.dim
    for ranks in settings.ranks:
        tree = ranks > 1 and peers.has_lucidrains()
        notes = {TREE: peers.MISSING} if ranks > 1 and not tree else {}
        for keys in settings.keys:
            size = keys, settings.hidden_size, heads, settings.block_size, tree
            site = OnRanks(bench.pool, ranks, contestants, *size)
            bar = keys == settings.bar_keys and ranks == settings.bar_ranks
            case = bench.case({"keys": keys, "ranks": ranks}, [site], READ, notes, bar=bar)
            case.add_rates(_bytes(ranks, keys, settings), "B")
            yield case


def _bytes(ranks: int, keys: int, settings: DCPDecode) -> dict[str, float]:
    """What has to be read, in fp32, by all ranks together."""
    heads = settings.heads
    cache = 2 * keys * heads.num_kv * heads.dim * 4
    weights = ranks * settings.hidden_size * (heads.num + 2 * heads.num_kv) * heads.dim * 4
    with_weights = dict.fromkeys((LAYER, WEIGHTS), cache + weights)
    return {**dict.fromkeys((STEP, TREE, TREE_PACKED, READ), cache), **with_weights}


def bars(cases: Sequence[Case], settings: DCPDecode) -> list[Bar]:
    case = find(cases, keys=settings.bar_keys, ranks=settings.bar_ranks)
    size = f"{settings.bar_keys:,} keys, {settings.bar_ranks} ranks"
    weights = case.fastest(WEIGHTS) if case else None
    missing = "" if peers.has_lucidrains() else peers.MISSING
    return [
        Bar(f"{STEP}, over a plain read, {size}", case and case.ratio(STEP), 1.35),
        Bar(
            f"{LAYER}, over a plain read of cache and weights, {size}",
            case.ratio(LAYER, weights) if case and weights else None,
            1.35,
        ),
        Bar(
            f"{TREE}, over cplayers, {size}",
            case and case.ratio(TREE, STEP),
            3.0,
            at_least=True,
            why=missing,
        ),
    ]
