"""The scheduler without ranks: groups are played by plain numbers, on any settings and traces."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cplayers.cache import BlockPool
from cplayers.serving import Fleet, Replicas, Request, Scheduler, ServingConfig

POINTS = 3000
SEEDS = st.integers(0, 10**6)


@dataclass
class Group:
    """A group that computes nothing, but takes blocks and counts tokens as real ones do."""

    size: int
    pool: BlockPool
    tables: dict[str, list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)


class World:
    """Replicas on which requests run, as the scheduler tells them to."""

    def __init__(self, config: ServingConfig, replicas: int, requests: list[Request]) -> None:
        self.config, self.requests = config, requests
        self.fleet = Fleet(replicas, 1, config.sizes)
        self.scheduler = Scheduler(config, self.fleet)
        self.groups: dict[Replicas, Group] = {}
        self.now = 0.0
        self.rng = random.Random(len(requests))
        self.fresh: dict[str, int] = {}
        self.spent: dict[Replicas, float] = {}

    def used(self) -> dict[int, int]:
        """Masks of used blocks; no block may be two requests' on one replica."""
        masks = dict.fromkeys(self.fleet.replicas, 0)
        for replicas, group in self.groups.items():
            for replica in replicas:
                assert not masks[replica] & group.pool.used_mask, "a block is used twice"
                masks[replica] |= group.pool.used_mask
        return masks

    def point(self) -> None:
        """One agreed point, and the steps after it."""
        self.now += 1.0
        scheduler = self.scheduler
        used = self.used()
        for replicas, group in self.groups.items():
            for name in list(group.tables):
                new = self.fresh.pop(name, 0)
                scheduler.advance(name, group.cached[name], [1] * new, [self.now] * new)
                if scheduler.requests[name].is_over:
                    self.leave(replicas, name)
        for request in self.requests:
            if request.arrival <= self.now and request.name not in scheduler.requests:
                scheduler.submit(request, self.now)
        result = scheduler.decide(self.now, used, self.spent)
        for replicas in self.fleet.groups:
            group = self.groups.setdefault(
                replicas, Group(len(replicas), BlockPool(self.config.num_blocks))
            )
            group.pool.lend(result.lend.get(replicas, ()))
        for name, replicas in result.evict:
            self.leave(replicas, name)
        for name, source, target in result.move:
            self.join(target, name, self.groups[source].cached[name])
        self.used()  # while both hold it
        for name, source, _ in result.move:
            self.leave(source, name)
        for name, replicas in result.admit:
            self.join(replicas, name, 0)
        self.spent = {}
        for replicas, group in self.groups.items():
            if replicas not in result.resting:
                self.run(group, result.stalled, result.extra.get(replicas, 0))
                if group.tables:
                    self.spent[replicas] = self.rng.uniform(0.0, 1.0)

    def leave(self, replicas: Replicas, name: str) -> None:
        group = self.groups[replicas]
        group.pool.release(group.tables.pop(name))
        del group.cached[name]

    def join(self, replicas: Replicas, name: str, cached: int) -> None:
        group = self.groups[replicas]
        group.tables[name], group.cached[name] = [], 0
        self.fill(group, name, cached)

    def fill(self, group: Group, name: str, tokens: int) -> None:
        group.cached[name] += tokens
        need = self.scheduler.router.blocks(group.size, group.cached[name])
        table = group.tables[name]
        table += group.pool.allocate(need - len(table))  # raises where it was lent too little

    def run(self, group: Group, stalled: set[str], extra: int) -> None:
        least = self.config.steps_of(group.size)
        for step in range(least + self.rng.randint(0, extra)):
            budget = self.config.chunk_of(group.size) if step < least else 0
            for name in [name for name in group.tables if name not in stalled]:
                progress = self.scheduler.requests[name]
                made = self.fresh.get(name, 0)
                if len(progress.new) + made >= progress.request.max_new_tokens:
                    continue
                left = progress.length + made - group.cached[name]
                count = 1 if left == 1 else min(left, budget)
                budget -= count if left > 1 else 0
                if count:
                    self.fill(group, name, count)
                if count == left:
                    self.fresh[name] = made + 1

    @property
    def is_over(self) -> bool:
        requests = self.scheduler.requests
        return len(requests) == len(self.requests) and all(p.is_over for p in requests.values())


def world_of(seed: int) -> World:
    rng = random.Random(seed)
    sizes = rng.choice([(1,), (2,), (4,), (1, 2), (1, 4), (1, 2, 4)])
    marks = sorted(rng.choice([rng.randint(1, 80), None]) or 10**6 for _ in sizes[1:])
    config = ServingConfig(
        num_blocks=rng.choice([6, 12, 40]),
        block_size=rng.choice([1, 4]),
        interleave_size=rng.choice([1, 3, 4]),
        sizes=sizes,
        crossovers=dict(zip(sizes[1:], marks, strict=True)),
        chunk_tokens=rng.choice([1, 5, 16]),
        steps=rng.choice([1, 4, 7, {sizes[0]: 7}, {size: rng.randint(1, 9) for size in sizes}]),
        share=rng.choice([0.1, 0.5, 1.0]),
        same_processors=rng.choice([False, True]),
        stretch=rng.choice([1, 3]),
        headroom=rng.choice([1, 8, 30]),
        patience=rng.choice([1, 10, 100]),
        max_running=rng.choice([1, 3, 64]),
    )
    requests = [
        Request(
            f"r{i}",
            (0,) * rng.choice([1, rng.randint(1, 30), rng.randint(1, 150)]),
            rng.choice([1, rng.randint(1, 60)]),
            rng.uniform(0, 30),
        )
        for i in range(rng.choice([1, 5, 25]))
    ]
    return World(config, 4, requests)


@given(SEEDS)
@example(103)  # one moves to a group that rests, which needs blocks for what comes
@example(576)
def test_every_request_ends_within_the_memory_that_there_is(seed: int) -> None:
    world = world_of(seed)
    for _ in range(POINTS):
        if world.is_over:
            break
        world.point()
    assert world.is_over, [p for p in world.scheduler.requests.values() if not p.is_over][:3]
    largest = max(world.config.sizes)
    for progress in world.scheduler.requests.values():
        blocks = world.scheduler.router.blocks(largest, progress.request.most_cached)
        assert bool(progress.refused) == (blocks > world.config.num_blocks)
        if not progress.refused:
            assert len(progress.new) == progress.request.max_new_tokens
    world.point()
    assert set(world.used().values()) == {0}


@given(SEEDS, st.integers(1, 60), st.integers(0, 3))
def test_every_request_ends_when_a_replica_is_lost(seed: int, when: int, lost: int) -> None:
    world = world_of(seed)
    for _ in range(when):
        world.point()
    scheduler = world.scheduler
    world.fleet = world.fleet.without([lost])
    world.groups = {g: group for g, group in world.groups.items() if lost not in g}
    intact = {
        name: replicas
        for replicas, group in world.groups.items()
        for name in group.tables
        if scheduler.requests[name].group == replicas
    }
    scheduler.lose(world.fleet, intact, world.now)
    for name in [name for name in world.fresh if name not in intact]:
        del world.fresh[name]
    for _ in range(POINTS):
        if world.is_over:
            break
        world.point()
    assert world.is_over, (scheduler.decisions[-8:], scheduler.placed, world.groups)
    for progress in scheduler.requests.values():
        if not progress.refused:
            assert len(progress.new) == progress.request.max_new_tokens
        else:
            blocks = scheduler.router.blocks(3, progress.request.most_cached)
            assert blocks > world.config.num_blocks or 4 not in world.config.sizes


def test_a_long_request_is_not_overtaken_for_ever() -> None:
    """Short ones come all the time; the long one needs all the memory of its group."""
    config = ServingConfig(
        num_blocks=8, block_size=4, interleave_size=4, sizes=(1, 4), chunk_tokens=8, patience=10
    )
    short = [Request(f"s{i}", (0,) * 4, 12, 0.5 * i) for i in range(400)]
    long = Request("long", (0,) * 110, 10, 5.2)
    world = World(config, 4, [*short, long])
    while not world.is_over:
        world.point()
    log = world.scheduler.decisions
    came, began, ended = (
        next(e["time"] for e in log if e["event"] == event and e["request"] == "long")
        for event in ("arrive", "admit", "finish")
    )
    assert began - came < 30 and ended - came < 80
    waits = [e["waited"] for e in log if e["event"] == "admit" and e["request"] != "long"]
    assert max(waits) < 80, "and the short ones are not starved either"


@pytest.mark.parametrize("patience", [10])
def test_short_requests_run_while_a_long_one_is_computed(patience: int) -> None:
    config = ServingConfig(
        num_blocks=64, block_size=4, interleave_size=4, sizes=(1, 4), chunk_tokens=4, steps=4
    )
    long = Request("long", (0,) * 800, 4, 0.0)
    short = [Request(f"s{i}", (0,) * 8, 8, 5.0 + i) for i in range(20)]
    world = World(config, 4, [long, *short])
    while not world.is_over:
        world.point()
    log = world.scheduler.decisions
    ends = {e["request"]: e["time"] for e in log if e["event"] == "finish"}
    begins = {e["request"]: e["time"] for e in log if e["event"] == "arrive"}
    assert ends["long"] > ends["s19"], "the example is none: the long one is over too early"
    assert not world.scheduler.unfinished
    assert max(ends[r.name] - begins[r.name] for r in short) <= 7
