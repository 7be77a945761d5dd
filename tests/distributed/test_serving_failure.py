"""Replicas that are killed while requests run: no request is lost, and none gets other tokens."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rank_processes import reports_of
from serving_cases import CONFIG, alone, requests, served

from cplayers import CPMesh, Topology
from cplayers.serving import ServedModel, Server, write_trace

GIVEN = requests(7, count=16, seconds=1.0, longest=100)
ROOMY = replace(CONFIG, num_blocks=48)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def dying_in_step(number: int) -> ServedModel:
    """A model whose process is killed in its n-th step, amid the layers."""
    model, steps = served(), 0
    mlp = model.module.blocks[0].mlp

    def count(*_: object) -> None:
        nonlocal steps
        steps += 1
        if steps == number:
            die()

    mlp.register_forward_hook(count)
    return model


def die_after(server: Server, point: int, seconds: float) -> None:
    """Kill the process so long after an agreed point, whatever it is doing then."""
    while server.scheduler.points < point:
        time.sleep(0.0005)
    time.sleep(seconds)
    die()


Losses = dict[int, tuple[int, float]]


MANY = requests(11, count=60, seconds=3.0, longest=400)
SPACIOUS = replace(CONFIG, num_blocks=150, crossovers={2: 60, 4: 200}, chunk_tokens=32)


def serve_with_losses(steps: dict[int, int], points: Losses, rank: int, folder: Path):
    return serve_requests(GIVEN, ROOMY, steps, points, rank, folder)


def serve_requests(given, config, steps, points, rank: int, folder: Path):
    model = dying_in_step(steps[rank]) if rank in steps else served()
    server = Server(model, config, num_replicas=4)
    if rank in points:
        threading.Thread(target=die_after, args=(server, *points[rank]), daemon=True).start()
    done = server.run(given)
    write_trace(folder / f"trace-{rank}", server.trace)
    assert all(runner.cache.pool.num_used == 0 for runner in server.runners.values())
    return [(p.new, p.refused, p.recomputed) for p in done]


slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("steps", "points"),
    [
        ({3: 20}, {}),
        slow({0: 45}, {}),
        slow({1: 15, 2: 40}, {}),
        slow({0: 10, 1: 20, 3: 30}, {}),
        *[slow({}, {i % 4: (2 + 3 * i, 0.0031 * (i % 5))}) for i in range(12)],
        slow({}, {1: (5, 0.002), 2: (9, 0.011)}),
        slow({}, {0: (7, 0.0), 3: (7, 0.004)}),
    ],
    ids=str,
)
def test_no_request_is_lost(steps, points, tmp_path) -> None:
    reports = reports_of(partial(serve_with_losses, steps, points), 4, tmp_path)
    lost = {*steps, *points}
    assert set(reports) == set(range(4)) - lost
    first, *others = reports.values()
    assert all(other == first for other in others)
    assert isinstance(first, list), first
    assert [new for new, _, _ in first] == [alone(request) for request in GIVEN]
    traces = {(tmp_path / f"trace-{rank}").read_text() for rank in reports}
    assert len(traces) == 1
    lines = [json.loads(line) for line in traces.pop().splitlines()]
    assert sorted(
        r for line in lines if line["event"] == "lost" for r in line["replicas"]
    ) == sorted(lost)
    again = sum(count for _, _, count in first)
    assert again == sum(line["event"] in ("recompute", "evict") for line in lines)


@pytest.mark.slow
def test_sixty_requests_survive_a_kill_amid_the_trace(tmp_path) -> None:
    scenario = partial(serve_requests, MANY, SPACIOUS, {}, {1: (40, 0.01)})
    reports = reports_of(scenario, 4, tmp_path)
    assert set(reports) == {0, 2, 3}
    assert all(report == reports[0] for report in reports.values())
    assert [new for new, _, _ in reports[0]] == [alone(request) for request in MANY]
    lines = [json.loads(line) for line in (tmp_path / "trace-0").read_text().splitlines()]
    (loss,) = (line["time"] for line in lines if line["event"] == "lost")
    ends = [line["time"] for line in lines if line["event"] == "finish"]
    assert min(ends) < loss < max(ends), "it came amid the trace"


def raise_in_step(rank: int, folder: Path):
    model = served()
    if rank == 2:
        calls = iter(range(12))

        def count(*_: object) -> None:
            if next(calls, None) is None:
                raise ValueError("a weight is not a number")

        model.module.blocks[0].mlp.register_forward_hook(count)
    done = Server(model, ROOMY, num_replicas=4).run(GIVEN)
    return [p.new for p in done]


@pytest.mark.slow
def test_a_rank_that_raises_is_lost_like_one_that_dies(tmp_path) -> None:
    reports = reports_of(raise_in_step, 4, tmp_path)
    assert reports.pop(2) == "ValueError: a weight is not a number"
    expected = [alone(request) for request in GIVEN]
    assert reports == dict.fromkeys((0, 1, 3), expected)


def replicas_of_two(rank: int, folder: Path):
    model = served(CPMesh(Topology(tp=2, dp=2)))
    config = replace(ROOMY, sizes=(1, 2), crossovers={2: 40}, num_blocks=60)
    server = Server(model, config, num_replicas=2, ranks_per_replica=2)
    if rank == 3:
        threading.Thread(target=die_after, args=(server, 5, 0.003), daemon=True).start()
    return [p.new for p in server.run(GIVEN)]


@pytest.mark.slow
def test_what_is_left_of_a_replica_takes_no_part(tmp_path) -> None:
    reports = reports_of(replicas_of_two, 4, tmp_path)
    assert reports.pop(2).startswith(
        "RankFailedError: rank 2 is left of a replica that lost others"
    )
    expected = [alone(request) for request in GIVEN]
    assert reports == dict.fromkeys((0, 1), expected)
