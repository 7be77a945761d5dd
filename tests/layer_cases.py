"""Layers of one rank over a paged cache, for Triton's interpreter and for a GPU.

A script of steps is run in fp64 on the CPU in plain torch, in the dtype under test likewise, and
where it is tested. The error of the last is bounded by twice that of the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cplayers.attention import DCPGQAAttention, DCPMLAAttention, PCPPrefillAttention
from cplayers.cache import InterleavedLayout, PagedKVCache
from cplayers.cache.static import StaticDecode
from cplayers.mesh import CPMesh, Topology

HIDDEN, ROTARY = 32, 16
MESH = CPMesh(Topology())
STEPS: tuple[tuple[tuple[str, int], ...], ...] = (
    (("a", 13), ("b", 7)),  # prompts
    (("b", 1), ("a", 1)),
    (("c", 5), ("a", 3)),  # a prompt beside several tokens of a draft
    (("a", 19), ("c", 1)),  # a chunk over cached tokens
    (("c", 1), ("a", 1), ("b", 2)),
)


def gqa(window: int | None = None, backend: str = "auto") -> nn.Module:
    prefill = PCPPrefillAttention(strategy="gather_q", backend=backend, mesh=MESH)
    return DCPGQAAttention(
        HIDDEN,
        4,
        2,
        ROTARY,
        layer_idx=0,
        window=window,
        backend=backend,
        prefill=prefill,
        mesh=MESH,
    )


def windowed(backend: str = "auto") -> nn.Module:
    return gqa(9, backend)


def mla(backend: str = "auto") -> nn.Module:
    prefill = PCPPrefillAttention(strategy="gather_q", backend=backend, mesh=MESH)
    return DCPMLAAttention(
        HIDDEN,
        4,
        None,
        48,
        16,
        ROTARY,
        16,
        layer_idx=0,
        backend=backend,
        prefill=prefill,
        mesh=MESH,
    )


LAYERS: dict[str, Callable[..., Any]] = {
    "gqa": lambda backend="auto": gqa(None, backend),
    "windowed": windowed,
    "mla": mla,
}


def drawn(name: str, backend: str, dtype: torch.dtype, device: str, rounded: torch.dtype) -> Any:
    """A layer whose weights are those of a seed, rounded to ``rounded``."""
    torch.manual_seed(1)
    layer = LAYERS[name](backend=backend)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(3.0)  # peaked attention
    return layer.to(rounded).to(dtype).to(device)


def new_cache(layer: Any, dtype: torch.dtype, device: str) -> PagedKVCache:
    layout = InterleavedLayout(1, 3, 4)
    return PagedKVCache(layer.cache_spec, layout, 1, 64, dtype=dtype, device=device)


def angles(positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    frequencies = 100.0 ** (-torch.arange(ROTARY // 2, device=positions.device) / (ROTARY // 2))
    turn = (positions[:, None] * frequencies).repeat(1, 2)
    return turn.cos().to(dtype), turn.sin().to(dtype)


def inputs(step: int, rows: int, rounded: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(rows, HIDDEN, generator=generator).to(rounded)


@torch.no_grad()
def outputs(
    name: str, backend: str, dtype: torch.dtype, device: str, rounded: torch.dtype
) -> list[Tensor]:
    """What the layer returns in each step, in fp64 on the CPU."""
    layer = drawn(name, backend, dtype, device, rounded)
    cache = new_cache(layer, dtype, device)
    found = []
    for number, step in enumerate(STEPS):
        for seq in dict(step).keys() - set(cache.seqs):
            cache.add(seq)
        plan = cache.plan(step)
        x = inputs(number, plan.num_tokens, rounded).to(dtype).to(device)[plan.tokens]
        y = layer(x, angles(plan.positions, dtype), cache, plan)
        cache.commit(plan)
        assert y.isfinite().all()
        found.append(y.cpu().double())
    return found


def check_layer(name: str, dtype: torch.dtype, device: str, backend: str) -> None:
    exact = outputs(name, "math", torch.float64, "cpu", dtype)
    plain = outputs(name, "math", dtype, "cpu", dtype)
    found = outputs(name, backend, dtype, device, dtype)
    for step, (got, close, wanted) in enumerate(zip(found, plain, exact, strict=True)):
        allowed = 1e-5 * max(1.0, float(wanted.abs().max()))
        if dtype != torch.float32:
            allowed = 2 * float((close - wanted).abs().max())
        error = float((got - wanted).abs().max())
        assert error <= allowed, f"step {step} is off by {error:.2e}, allowed is {allowed:.2e}"


Record = Callable[[Callable[[], None]], Callable[[], None]]
"""Takes what a step does, and returns what does it again: itself, or a graph's replay."""


@torch.no_grad()
def check_replayed(name: str, device: str, record: Record) -> None:
    """Steps in static buffers, recorded once, equal the layer on plans of its own."""
    layer = drawn(name, "auto", torch.float32, device, torch.float32)
    cache = new_cache(layer, torch.float32, device)
    for seq, new in (("a", 13), ("b", 7)):
        cache.add(seq)
        plan = cache.plan([(seq, new)])
        x = inputs(new, new, torch.float32).to(device)
        layer(x, angles(plan.positions, torch.float32), cache, plan)
        cache.commit(plan)
    buffers = StaticDecode(cache, 4, new_tokens=2, windows=[layer.scoring.window])
    nobody = buffers.load(cache.plan([]))  # recording may run it, which must change nothing
    before = [store.clone() for store in cache.storage.stores(0)]
    x, y = torch.zeros(4, HIDDEN, device=device), torch.full((4, HIDDEN), math.nan, device=device)

    def step() -> None:
        y.copy_(layer(x, angles(buffers.positions, torch.float32), cache, nobody))

    replay = record(step)
    for store, old in zip(cache.storage.stores(0), before, strict=True):
        assert torch.equal(store, old)
    for number in range(7):
        if number == 2:
            cache.fork("a", "c")
        if number == 5:
            cache.truncate("b", 4)
        running = [("b", 1), ("a", 1 + number % 2)] + [("c", 1)] * (2 <= number < 6)
        plan = cache.plan(running)
        x[: plan.num_rows] = inputs(number, plan.num_rows, torch.float32).to(device)
        wanted = layer(x[: plan.num_rows], angles(plan.positions, torch.float32), cache, plan)
        assert buffers.load(plan) is nobody
        y.fill_(math.nan)
        replay()
        torch.testing.assert_close(y[: plan.num_rows], wanted, rtol=1e-5, atol=1e-5)
        assert not y[plan.num_rows :].any()
        cache.commit(plan)
