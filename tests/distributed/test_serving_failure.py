"""Replicas that are killed while requests run: no request is lost, and none gets other tokens."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from rank_processes import reports_of
from serving_cases import CONFIG, alone, requests, served

from cplayers import CPMesh, RankFailedError, Topology
from cplayers.mesh import health
from cplayers.serving import ServedModel, Server, recovery, write_trace
from cplayers.serving import server as server_module

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


FEW = requests(7, count=8, seconds=0.3, longest=60)


def tokens(server: Server, given=FEW) -> list[list[int]]:
    return [p.new for p in server.run(given)]


def after(function, happens):
    """``function``, and ``happens(calls so far, what it returned)`` after each call."""
    calls = 0

    def called(*given: object) -> object:
        nonlocal calls
        calls += 1
        result = function(*given)
        happens(calls, result)
        return result

    return called


def kill_after(seconds: float) -> None:
    threading.Thread(target=lambda: (time.sleep(seconds), die()), daemon=True).start()


def raise_in_step(kind: type[BaseException], rank: int, folder: Path):
    """Rank 2 raises in a step that it shares with rank 3, and its process lives on."""
    model = served()

    def fail(calls: int, _: object) -> None:
        if calls == 11:
            raise kind("a weight is not a number")

    if rank == 2:
        mlp = model.module.blocks[0].mlp  # before the next block's collectives
        mlp.forward = after(mlp.forward, fail)
    server = Server(model, replace(ROOMY, sizes=(2,), crossovers={}), num_replicas=4)
    if rank != 2:
        began = time.monotonic()
        return [tokens(server), time.monotonic() - began < 15]
    with pytest.raises(kind):
        server.run(FEW)
    while not all((folder / f"{other}.json").exists() for other in (0, 1, 3)):
        time.sleep(0.05)
    with pytest.raises(RankFailedError, match="rank 2 came too late"):
        server.run(FEW[:0])
    return "left"


@pytest.mark.parametrize("kind", [ValueError, slow(KeyboardInterrupt)])
def test_a_rank_that_raises_is_lost_like_one_that_dies(kind, tmp_path) -> None:
    reports = reports_of(partial(raise_in_step, kind), 4, tmp_path)
    assert reports.pop(2) == "left"
    expected = [alone(request) for request in FEW]
    assert reports == {rank: [expected, True] for rank in (0, 1, 3)}


def lose_in_recovery(rank: int, folder: Path):
    """Rank 1 dies; rank 3 dies once all have agreed to go on with it. Nobody may go on anew."""
    server = Server(served(), ROOMY, num_replicas=4)
    if rank == 1:
        kill_after(0.15)
    if rank == 3:
        recovery.regroup = after(recovery.regroup, lambda *_: die())
    done = tokens(server)
    with pytest.raises(RankFailedError):
        Server(served(), ROOMY, num_replicas=4)
    more = [replace(request, name=f"again {request.name}") for request in FEW]
    return [done, tokens(server, more)]


def test_a_loss_in_recovery_is_survived(tmp_path) -> None:
    expected = [alone(request) for request in FEW]
    reports = reports_of(lose_in_recovery, 4, tmp_path)
    assert reports == {rank: [expected, expected] for rank in (0, 2)}


def lose_amid_settling(rank: int, folder: Path):
    """The exchange in which ranks tell what they hold ends on rank 0 only, then rank 3 dies."""
    server = Server(served(), ROOMY, num_replicas=4)
    if rank == 1:
        kill_after(0.2)

    def happens(_: int, said: list[bytes]) -> None:
        if recovery.is_loss(said) and server.live == (0, 1, 2, 3):
            if rank == 3:
                time.sleep(0.3)
                die()
            if rank == 2:
                raise RankFailedError("the connection to rank 3 broke at the end", 3)

    server_module.gather_bytes = after(server_module.gather_bytes, happens)
    return [tokens(server), [e["replicas"] for e in server.trace if e["event"] == "lost"]]


def test_a_rank_that_missed_the_end_of_recovery_is_told(tmp_path) -> None:
    reports = reports_of(lose_amid_settling, 4, tmp_path)
    expected = [alone(request) for request in FEW]
    assert reports == {rank: [expected, [[1], [3]]] for rank in (0, 2)}


def miss_the_end(rank: int, folder: Path):
    """The exchange that ends all requests does so on ranks 0 and 1 only, who then run others."""
    config, missed = replace(ROOMY, sizes=(1, 3), crossovers={3: 40}), []
    server = Server(served(), config, num_replicas=3)

    def happens(_: int, said: list[bytes]) -> None:
        told = [each for text in said for each in json.loads(text).get("progress", {}).values()]
        count = sum(len(new) for _, new, _ in told)
        count += sum(len(p.new) for p in server.scheduler.requests.values())
        if rank == 2 and not missed and count == sum(each.max_new_tokens for each in FEW):
            missed.append(True)
            raise RankFailedError("the connection to rank 1 broke at the end", 1)

    server_module.gather_bytes = after(server_module.gather_bytes, happens)
    more = [replace(request, name=f"again {request.name}") for request in FEW]
    return [tokens(server), tokens(server, more), missed]


@pytest.mark.slow
def test_a_rank_that_missed_the_end_of_a_run_is_told(tmp_path) -> None:
    expected = [alone(request) for request in FEW]
    assert reports_of(miss_the_end, 3, tmp_path) == {
        0: [expected, expected, []],
        1: [expected, expected, []],
        2: [expected, expected, [True]],
    }


def fail_in_passing(rank: int, folder: Path):
    """Exchanges that break now and then, and then one that always does."""
    config, found = replace(ROOMY, sizes=(1, 2), crossovers={2: 40}), []
    server = Server(served(), config, num_replicas=2)

    def fail(*_: object) -> None:
        raise RankFailedError("a connection was reset", 1 - rank)

    execute = server._execute
    for i in range(6):
        happens = [fail] + [execute] * 1000
        server._execute = lambda result, happens=happens: happens.pop(0)(result)
        found.append(tokens(server, [replace(FEW[0], name=f"{i}")]))
    server._execute = fail
    with pytest.raises(RankFailedError, match="a connection was reset"):
        tokens(server, FEW)
    return [found, server._past.vain]


def test_failures_count_in_a_row_only(tmp_path) -> None:
    expected = [[[alone(FEW[0])]] * 6, recovery.TRIES + 1]
    reports = reports_of(fail_in_passing, 2, tmp_path)
    assert reports == dict.fromkeys((0, 1), expected)


def lose_one_while_another_is_busy(rank: int, folder: Path):
    model = served()
    if rank == 0:
        wait = 1.2 * health.SETTLE_S
        model.logits = after(model.logits, lambda calls, _: time.sleep(wait if calls == 5 else 0))
    server = Server(model, replace(ROOMY, sizes=(1,), crossovers={}), num_replicas=4)
    if rank == 3:
        kill_after(0.3)
    return tokens(server)


@pytest.mark.slow
def test_a_replica_amid_a_long_step_is_waited_for(tmp_path) -> None:
    expected = [alone(request) for request in FEW]
    reports = reports_of(lose_one_while_another_is_busy, 4, tmp_path)
    assert reports == dict.fromkeys((0, 1, 2), expected)


def lose_at_random(seed: int, rank: int, folder: Path):
    """Two or three of four ranks die, at any time and often one soon after another."""
    rng = random.Random(seed)
    sizes = rng.choice([(1, 2, 4), (1, 2), (1, 4), (2, 4), (1,)])
    marks = sorted(rng.choice([10, 30, 60, 90]) for _ in sizes[1:])
    config = replace(
        CONFIG,
        num_blocks=rng.choice([24, 40, 80]),
        sizes=sizes,
        crossovers=dict(zip(sizes[1:], marks, strict=True)),
        chunk_tokens=rng.choice([4, 16]),
        steps=rng.choice([1, 4]),
        max_running=rng.choice([1, 3, 64]),
    )
    server = Server(served(), config, num_replicas=4)
    doomed = rng.sample(range(4), rng.choice([2, 3]))
    times = {each: rng.uniform(0.05, 1.0) for each in doomed}
    if rng.random() < 0.5:
        times[doomed[1]] = times[doomed[0]] + rng.uniform(0, 0.6)
    if rank in times:
        kill_after(times[rank])
    done = server.run(requests(seed, count=14, seconds=0.6, longest=60))
    for runner in server.runners.values():
        assert runner.cache.pool.num_used == 0
        assert not runner.cache.seqs
    return [(p.new, bool(p.refused), p.recomputed) for p in done]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100, 112))
def test_random_losses_are_survived(seed, tmp_path) -> None:
    first, *others = reports_of(partial(lose_at_random, seed), 4, tmp_path).values()
    assert all(other == first for other in others)
    for (new, refused, _), request in zip(
        first, requests(seed, count=14, seconds=0.6, longest=60), strict=True
    ):
        whole = alone(request)
        assert new == (whole[: len(new)] if refused else whole)


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
