"""What every rank of `long_context.py` does: fill its cache, run the layer, take the times."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any

import torch
from long_context_exact import (
    DTYPES,
    EPS,
    GRAIN,
    LATENT,
    NOPE,
    ROPE,
    WIDTH,
    Settings,
    grain,
    inputs,
    weights,
)
from torch import Tensor, nn

from cplayers import CPMesh, DCPMLAAttention, InterleavedLayout, MLASpec, PagedKVCache, Topology
from cplayers.attention import CachedLayer, attend_cached
from cplayers.cache import StepPlan

SEQ = "context"


def build(settings: Settings, mesh: CPMesh, decode: Any, combine: Any) -> DCPMLAAttention:
    """This rank's layer."""
    modules: dict[str, Any] = {}
    for name, weight in weights(settings).items():
        if weight.dim() == 1:
            modules[name] = nn.RMSNorm(len(weight), eps=EPS)
        else:
            modules[name] = nn.Linear(*weight.shape[::-1], bias=False, device="meta")
        modules[name].weight = nn.Parameter(weight, requires_grad=False)
    return DCPMLAAttention.from_full(
        **modules,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        layer_idx=0,
        decode=decode,
        combine=combine,
        norm_eps=EPS,
        mesh=mesh,
    )


def fill(cache: PagedKVCache, settings: Settings, mesh: CPMesh) -> int:
    """Write the rows that this rank owns, and nothing else; returns how many they are."""
    cache.add(SEQ)
    held, start = 0, time.perf_counter()
    for first in range(0, settings.tokens, settings.fill):
        count = min(settings.fill, settings.tokens - first)
        plan = cache.plan([(SEQ, count)], max_decode_tokens=0)  # chunks of a prompt
        # Rows of other ranks are never touched, and take no memory.
        rows = torch.empty(count, 1, WIDTH, dtype=cache.dtype)
        own = (plan.slot_mapping >= 0).nonzero().squeeze(1)
        for index in (own // GRAIN).unique().tolist():
            part = rows[index * GRAIN : (index + 1) * GRAIN, 0]
            part.copy_(grain(settings, first // GRAIN + index)[: len(part)])
        for writes in plan.prefill_writes:  # one: all PCP ranks
            cache.write(plan, 0, writes, rows)
        cache.commit(plan)
        held += len(own)
        if settings.progress and mesh.rank("tp") == 0:
            seconds = time.perf_counter() - start
            print(f"  rank 0: {first + count:>9,} tokens planned, {seconds:5.1f} s", flush=True)
    return held


def run_rank(settings: Settings, ranks: int) -> dict[str, Any]:
    """Fill this one of ``ranks`` ranks and run all variants on it; 1 is the unsharded layer."""
    mesh = CPMesh(Topology(tp=ranks, dcp=ranks))
    layout = InterleavedLayout(ranks, settings.interleave, settings.block)
    blocks = layout.blocks(settings.tokens + settings.new)
    spec, dtype = MLASpec(LATENT, ROPE), DTYPES[settings.dtype]
    cache = PagedKVCache(spec, layout, 1, blocks, mesh.rank("dcp"), dtype)
    start = time.perf_counter()
    held = fill(cache, settings, mesh)
    fill_s = time.perf_counter() - start
    used = cache.used_bytes
    with torch.no_grad():
        runs = [run_variant(settings, mesh, cache, *variant) for variant in settings.variants]
    return {
        "tokens": held,
        "used_bytes": used,
        "cache_bytes": cache.nbytes,
        "fill_s": fill_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "runs": runs,
    }


def run_variant(
    settings: Settings, mesh: CPMesh, cache: PagedKVCache, decode: str, combine: str
) -> dict[str, Any]:
    """Repeat the step; the first time warms up."""
    layer = build(settings, mesh, decode, combine)
    into_o_proj: list[Tensor] = []
    hook = layer.o_proj.register_forward_pre_hook(lambda _, args: into_o_proj.append(args[0]))
    x, cos, sin = inputs(settings)
    q = torch.randn(settings.new, settings.heads, WIDTH).to(x.dtype)
    times: dict[str, list[float]] = {"step": [], "attend": [], "read": []}
    for _ in range(settings.steps + 1):
        plan = cache.plan([(SEQ, settings.new)], max_decode_tokens=settings.new)
        with mesh.traffic.capture() as log:
            seconds, y = timed(mesh, lambda p=plan: layer(x, (cos, sin), cache, p))
        times["step"].append(seconds)
        cached = CachedLayer(cache, plan, 0)
        attend = timed(mesh, lambda c=cached: attend_cached(q, c, layer.scoring))
        times["attend"].append(attend[0])
        times["read"].append(timed(mesh, lambda p=plan: read(cache, p))[0])
        cache.commit(plan)
        cache.truncate(SEQ, settings.tokens)
        hook.remove()
    return {
        "attention": into_o_proj[0],
        "layer": y,
        "traffic": [list(record) for record in log][1:],  # the first is that of `timed`
        "seconds": {name: values[1:] for name, values in times.items()},
    }


def plain_tp(settings: Settings, attention: Tensor) -> Tensor:
    """The layer's output under TP alone, from the unsharded attention output `[T, N * V]`.

    Which heads a rank has does not change them, so this is the layer with dcp = 1, without a whole
    cache on every rank.
    """
    mesh = CPMesh(Topology(tp=settings.ranks))
    own = attention.chunk(settings.ranks, -1)[mesh.rank("tp")]
    with torch.no_grad():
        return build(settings, mesh, "gather_q", "a2a").o_proj(own)


def timed(mesh: CPMesh, work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of ``work`` on this rank, begun on all ranks together, and its result."""
    mesh.all_reduce(torch.zeros(1), "tp")
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def read(cache: PagedKVCache, plan: StepPlan) -> list[Tensor]:
    """One pass over this rank's shard."""
    shards = [plane for r in plan.reads() for plane in cache.view(0, r.slot, r.length)]
    return [shard.squeeze(1).view(torch.int64).sum() for shard in shards]
