"""Calibrated crossovers hold: at half of one the one choice wins, at twice the other, in one run.

What is measured is a layer's whole step, by the same ranks that were calibrated a moment before.
The contestants take turns, and the fastest repeat of each counts, as in `calibrate`. It is for a
machine with a core for each rank and nothing else to do.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from cplayers import CPMesh, DCPGQAAttention, InterleavedLayout, PagedKVCache, Topology
from cplayers.attention import PCPPrefillAttention
from cplayers.planning import Crossovers, ModelShape, calibrate, crossovers

SHAPE = ModelShape("layer", 64, 1, 32, 8, 128, 128, 64, 64)
TOPOLOGY = Topology(pcp=2, dcp=2)
CHUNK = 256
Work = Callable[[], object]


class Duel(NamedTuple):
    """Seconds of two contestants at a size."""

    size: int
    smaller: float
    larger: float


def step(mesh: CPMesh, context: int, new: int, combine: str = "a2a", prefill: str = "auto") -> Work:
    """One step of a layer of `SHAPE` over ``context`` cached tokens, to be run again and again."""
    torch.manual_seed(0)
    layer = DCPGQAAttention(
        SHAPE.hidden_size,
        SHAPE.num_heads,
        SHAPE.num_kv_heads or 1,
        SHAPE.head_dim,
        layer_idx=0,
        combine=combine,  # type: ignore[arg-type]
        prefill=PCPPrefillAttention(prefill, mesh=mesh),
        mesh=mesh,
    )
    layout = InterleavedLayout(mesh.size("dcp"), 16, 16)
    cache = PagedKVCache(
        layer.cache_spec,
        layout,
        1,
        layout.blocks(context + new) + 1,
        mesh.rank("dcp"),
        pcp_rank=mesh.rank("pcp"),
        pcp_size=mesh.size("pcp"),
    )
    cache.add("a")
    if context:
        cache.commit(cache.plan([("a", context)]))
    plan = cache.plan([("a", new)])
    x = torch.randn(plan.num_rows, SHAPE.hidden_size)
    angles = torch.randn(plan.num_rows, SHAPE.head_dim)

    def run() -> None:
        with torch.no_grad():
            layer(x, (angles.cos(), angles.sin()), cache, plan)

    return run


def fastest(mesh: CPMesh, work: Sequence[Work], repeats: int) -> list[float]:
    """Seconds of each one's fastest repeat, taking turns; of the slowest rank."""
    samples: list[list[float]] = [[] for _ in work]
    for repeat in range(repeats + 2):
        for run, taken in zip(work, samples, strict=True):
            mesh.all_reduce(torch.zeros(1), "pcp")  # all ranks begin together
            start = time.perf_counter()
            run()
            if repeat >= 2:
                taken.append(time.perf_counter() - start)
    found = torch.tensor([min(taken) for taken in samples])
    return [float(x) for x in mesh.all_reduce(found, "pcp", op="max")]


def duels(path: str) -> tuple[Crossovers, list[Duel], list[Duel], list[Duel]]:
    """Predicted crossovers, and measurements at half and twice each of them."""
    spread, alone = CPMesh(TOPOLOGY), CPMesh(replace(TOPOLOGY, dcp=1))
    found = calibrate(spread, path=Path(path), refresh=True)
    predicted = crossovers(
        SHAPE, TOPOLOGY, found.speeds(), chunk=CHUNK, dtype=torch.float32, precision="fp32"
    )
    assert predicted.dcp and predicted.gather_q and predicted.a2a

    def around(size: int) -> tuple[int, int]:
        return max(1, size // 2), 2 * size

    dcp = [
        Duel(n, *fastest(spread, [step(alone, n, 1), step(spread, n, 1)], 61))
        for n in around(predicted.dcp)
    ]
    gather_q = [
        Duel(
            n,
            *fastest(
                spread,
                [step(spread, n, CHUNK, prefill=how) for how in ("gather_kv", "gather_q")],
                15,
            ),
        )
        for n in around(predicted.gather_q)
    ]
    a2a = [
        Duel(n, *fastest(spread, [step(spread, 256, n, how) for how in ("ag_rs", "a2a")], 61))
        for n in around(predicted.a2a)
    ]
    return predicted, dcp, gather_q, a2a


@pytest.mark.slow
def test_calibrated_crossovers_hold_when_measured(ranks: Any, tmp_path: Path) -> None:
    results = ranks(2).run(duels, str(tmp_path / "calibration.json"))
    assert results[0] == results[1]
    predicted, *measured = results[0]
    for size, pair in zip(predicted, measured, strict=False):
        below, above = pair
        if size > 1:  # at 1 the larger choice wins everywhere
            assert below.smaller < below.larger, f"{predicted}: at half, {below}"
        assert above.larger < above.smaller, f"{predicted}: at twice, {above}"
