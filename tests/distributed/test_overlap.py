"""What runs while tensors travel: projections behind queries, attention behind results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from cplayers.attention import DCPGQAAttention, gather_q
from cplayers.cache import InterleavedLayout, PagedKVCache
from cplayers.mesh import CPMesh, Topology
from cplayers.mesh.collectives import Hop

HIDDEN, HEADS, DIM = 32, 4, 16
CACHED = (40, 3, 9, 25)


def tell(owner: Any, name: str, event: str, events: list[str]) -> Callable[[], None]:
    """Note each call of a function, which does its work as before; returns what undoes that."""
    original = getattr(owner, name)

    def told(*args: Any, **kwargs: Any) -> Any:
        events.append(event)
        return original(*args, **kwargs)

    setattr(owner, name, told)
    return lambda: setattr(owner, name, original)


def decode(overlap: bool, combine: str, requests: int) -> tuple[list[str], list[Any], Tensor]:
    """Events and traffic of a decode step on this rank, and its result."""
    mesh = CPMesh(Topology(tp=2, dcp=2))
    torch.manual_seed(0)
    layer = DCPGQAAttention(
        HIDDEN, HEADS, 1, DIM, layer_idx=0, combine=combine, overlap=overlap, mesh=mesh
    )
    cache = PagedKVCache(layer.cache_spec, InterleavedLayout(2, 1, 4), 1, 64, mesh.rank("dcp"))
    angles = lambda n: (torch.ones(n, DIM), torch.zeros(n, DIM))  # noqa: E731
    with torch.no_grad():
        for seq, new in enumerate(CACHED[:requests]):
            cache.add(seq)
            plan = cache.plan([(seq, new)])
            layer(torch.randn(new, HIDDEN), angles(new), cache, plan)
            cache.commit(plan)
        plan = cache.plan([(seq, 1) for seq in range(requests)])
        x = 4 * torch.randn(requests, HIDDEN)
        events: list[str] = []
        undo = [
            tell(mesh, "start_all_gather", "gather", events),
            tell(layer.k_proj, "forward", "project keys", events),
            tell(cache, "write", "write", events),
            tell(gather_q, "attend_cached", "attend", events),
            tell(mesh, "start_all_to_all", "send", events),
            tell(Hop, "wait", "wait", events),
        ]
        try:
            with mesh.traffic.capture() as log:
                y = layer(x, angles(requests), cache, plan)
        finally:
            for back in undo:
                back()
    return events, [(r.operation, r.bytes) for r in log if r.axis == "dcp"], y


@pytest.mark.parametrize("requests", [1, 2, 4])
def test_results_travel_while_the_other_half_is_attended_to(
    ranks: Callable[[int], Any], requests: int
) -> None:
    pool = ranks(2)
    before = ["gather", "project keys", "write", "wait"]
    plain = pool.run(decode, False, "a2a", requests)
    halves = pool.run(decode, True, "a2a", requests)
    for (events, log, y), (split_events, split_log, split_y) in zip(plain, halves, strict=True):
        assert events == [*before, "attend", "send", "wait"]
        torch.testing.assert_close(split_y, y, rtol=1e-5, atol=1e-6)
        if requests == 1:
            assert (split_events, split_log) == (events, log)
            continue
        assert split_events == [*before, "attend", "send", "attend", "send", "wait", "wait"]
        assert split_log[0] == log[0]
        (_, sent), parts = log[1], [bytes_ for _, bytes_ in split_log[1:]]
        assert [name for name, _ in split_log] == ["all_gather", "all_to_all", "all_to_all"]
        assert sum(parts) == sent
        # 40 cached tokens against 3, 9 and 25, and 40 against 3
        assert parts[0] == sent // requests


def test_others_than_a2a_are_combined_at_once(ranks: Callable[[int], Any]) -> None:
    plain, asked = (ranks(2).run(decode, overlap, "ag_rs", 4) for overlap in (False, True))
    for (events, log, y), (asked_events, asked_log, asked_y) in zip(plain, asked, strict=True):
        assert (asked_events, asked_log) == (events, log)
        assert torch.equal(y, asked_y)
