"""The plain parts of serving: settings, groups, room, lent blocks, traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from serving_cases import served
from transfer_cases import Side, check, fill

from cplayers.cache import BlockPool, GQASpec, InterleavedLayout, PagedKVCache, Plane
from cplayers.errors import CacheFullError, ConfigError, StateError
from cplayers.serving import (
    Fleet,
    Progress,
    Request,
    Server,
    ServingConfig,
    read_trace,
    write_trace,
)
from cplayers.serving.room import Room
from cplayers.serving.router import Router


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_blocks": 0}, "num_blocks=0: an int of at least 1"),
        ({"steps": 1.5}, r"steps=1\.5"),
        ({"steps": {2: 4}}, "the smallest size has some"),
        ({"steps": {1: 4, 2: 0}}, "steps of a group"),
        ({"share": 0.0}, "share=0.0: a larger group's part"),
        ({"share": 1.5}, "above 0 and at most 1"),
        ({"same_processors": 1}, "either all replicas share processors, or none do"),
        ({"stretch": 0}, "stretch=0: an int of at least 1"),
        ({"sizes": ()}, "sizes of groups ascend"),
        ({"sizes": (2, 1)}, "sizes of groups ascend"),
        ({"crossovers": {2: 100, 4: 50}}, "larger groups begin at longer ones"),
        ({"crossovers": {3: 100}}, "crossovers={3: 100}"),
        ({"crossovers": {2: 50.5}}, "contexts of at least one token"),
        ({"crossovers": {2: -5}}, "contexts of at least one token"),
        ({"crossovers": None}, "crossovers=None: they map sizes"),
        ({"sizes": (1.0, 2)}, "sizes of groups ascend"),
        ({"sizes": (0, 2)}, "sizes of groups ascend"),
        ({"sizes": "12"}, "sizes of groups ascend"),
        ({"share": None}, "share=None: a larger group's part"),
    ],
)
def test_settings_that_cannot_be_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServingConfig(**{"num_blocks": 8, **options})


def test_a_crossover_is_the_first_length_that_prefers_a_size() -> None:
    config = ServingConfig(num_blocks=8, crossovers={2: 100, 4: 1000})
    assert [config.preferred(n) for n in (1, 99, 100, 999, 1000)] == [1, 1, 2, 2, 4]
    never = ServingConfig(num_blocks=8, crossovers={2: None, 4: 1000})
    assert [never.preferred(n) for n in (999, 1000)] == [1, 4]
    assert ServingConfig(num_blocks=8, sizes=(2, 4)).preferred(1) == 2


def test_large_groups_begin_where_small_ones_end() -> None:
    router = Router(ServingConfig(num_blocks=8), Fleet(4, 1, (1, 2, 4)))
    free = dict.fromkeys(range(4), 0)
    assert router.candidates(1, free) == [(0,), (1,), (2,), (3,)]
    assert router.candidates(2, free) == [(2, 3), (0, 1)]
    assert router.candidates(2, {**free, 3: 1}) == [(0, 1), (2, 3)], "the least busy first"
    assert router.candidates(2, {**free, 0: 1}, near=(0,)) == [(0, 1), (2, 3)]


def test_only_a_group_of_one_rank_goes_on_by_its_own_clock() -> None:
    config = ServingConfig(num_blocks=8, steps=5, stretch=3)
    assert [Router(config, Fleet(4, 1, (1, 2))).extra(g) for g in ((0,), (0, 1))] == [10, 0]
    assert Router(config, Fleet(4, 2, (1, 2))).extra((0,)) == 0
    router = Router(config, Fleet(4, 1, (1, 2)))
    assert router.growth(progress_of(100, 40, cached=99), 1, 10) == 15
    assert router.growth(progress_of(100, 8, cached=99), 1, 10) == 8, "its end comes first"


def test_steps_by_size() -> None:
    whole = ServingConfig(num_blocks=8, steps=4)
    assert [whole.steps_of(size) for size in (1, 2, 3, 4, 8)] == [4, 2, 1, 1, 1]
    named = ServingConfig(num_blocks=8, steps={1: 9, 2: 5, 4: 2})
    assert [named.steps_of(size) for size in (1, 2, 3, 4)] == [9, 5, 5, 2]
    left = ServingConfig(num_blocks=8, sizes=(2, 4), steps={2: 5, 4: 1})
    assert left.steps_of(1) == 5, "a group below the smallest size, after a loss"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": 1}, "a request named 1: names are str"),
        ({"prompt": [1, 2]}, r"request 'a' with \[1, 2\] in its prompt: token ids are a tuple"),
        ({"prompt": (1, -2)}, "request 'a' with -2 in its prompt"),
        ({"prompt": (1, 2.0)}, "request 'a' with 2.0 in its prompt"),
        ({"prompt": (1, True)}, "request 'a' with True in its prompt"),
        ({"stop": 7}, "request 'a' with 7 in its stop"),
        ({"arrival": float("nan")}, "arrival=nan: arrivals are finite"),
        ({"arrival": None}, "arrival=None: arrivals are finite"),
        ({"max_new_tokens": 3.5}, "max_new_tokens=3.5"),
    ],
)
def test_requests_of_other_types_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Request(**{"name": "a", "prompt": (1,), "max_new_tokens": 1, **options})


def test_a_server_is_refused_before_anything_is_built() -> None:
    config = ServingConfig(num_blocks=8, sizes=(1,))
    with pytest.raises(ConfigError, match="num_replicas=2 of ranks_per_replica=1 with 1 ranks"):
        Server(served(), config, num_replicas=2)
    with pytest.raises(ConfigError, match=r"layers of tp=1 with dcp=1 .* dcp_per_replica=2"):
        Server(served(), config, num_replicas=1, dcp_per_replica=2)


def test_requests_are_judged_before_any_is_served() -> None:
    server = Server(served(), ServingConfig(num_blocks=8, sizes=(1,)), num_replicas=1)
    with pytest.raises(ConfigError, match=r"request 'b' with token id 61: .* ids below 61"):
        server.run([Request("a", (1,), 1), Request("b", (3, 61), 1)])
    with pytest.raises(ConfigError, match=r"requests named \['a'\]"):
        server.run([Request("a", (1,), 1), Request("a", (2,), 1)])
    assert server.run([Request("a", (60,), 2)])[0].times, "nothing of it stayed"
    with pytest.raises(ConfigError, match=r"requests named \['a'\]"):
        server.run([Request("a", (1,), 1)])


@pytest.mark.parametrize(("prompt", "new"), [((), 1), ((1,), 0)])
def test_requests_without_work_are_refused(prompt: tuple[int, ...], new: int) -> None:
    with pytest.raises(ConfigError, match="generates at least one token"):
        Request("a", prompt, new)


def test_groups_of_a_fleet_and_of_what_is_left() -> None:
    fleet = Fleet(4, 2, (1, 2, 4))
    assert fleet.groups == [(0, 1, 2, 3), (0, 1), (2, 3), (0,), (1,), (2,), (3,)]
    assert fleet.ranks((1, 2)) == (2, 3, 4, 5)
    left = fleet.without([5])
    assert left.replicas == (0, 1, 3)
    assert left.groups == [(0, 1, 3), (0, 1), (0,), (1,), (3,)]
    assert left.without([0, 1]).groups == [(1, 3), (1,), (3,)]
    assert Fleet(8, 1, (1, 4)).without([6]).groups[0] == (0, 1, 2, 3)
    with pytest.raises(ConfigError, match="divides the number of replicas"):
        Fleet(6, 1, (1, 4))


def test_blocks_are_lent_where_all_members_have_them() -> None:
    room = Room(8, {0: 0b00000011, 1: 0b10000000})
    assert (room.common((0,)), room.common((0, 1))) == (6, 5)
    room.promise((0,), 2)
    assert room.fits((0,), 4) and not room.fits((0,), 5)
    assert room.lend((0, 1), 2) == [6, 5]
    assert room.lend((1,), 3) == [0, 1, 2]
    assert room.lend((0, 1), 2) == [4, 3]
    assert room.common((0, 1)) == 0


def progress_of(length: int, new: int, cached: int = 0) -> Progress:
    return Progress(Request("a", (0,) * length, new), 0, cached=cached)


def test_a_request_goes_to_the_smallest_group_that_holds_it() -> None:
    config = ServingConfig(num_blocks=4, block_size=4, interleave_size=4, headroom=4, steps=4)
    router = Router(config, Fleet(4, 1, (1, 2, 4)))
    sizes = [router.size_for(progress_of(n, 100)) for n in (1, 12, 13, 28, 29, 60)]
    assert sizes == [1, 1, 2, 2, 4, 4]
    assert router.can_end(progress_of(60, 5)) and not router.can_end(progress_of(60, 6))


def test_a_pool_takes_only_what_it_was_lent() -> None:
    pool = BlockPool(8)
    mine = pool.allocate(2)
    pool.lend([5, 6])
    assert (pool.num_available, pool.used_mask) == (2, sum(1 << block for block in mine))
    trial = pool.trial()
    assert trial.pick(2) == [5, 6]
    with pytest.raises(CacheFullError, match="1 more blocks are needed and 0 of 8 are left"):
        trial.pick(1)
    pool.lend([6, 7])
    with pytest.raises(StateError, match="block 5 was taken since the trial"):
        pool.apply(trial)
    assert pool.allocate(1) == [6]
    pool.release([6])
    assert pool.allocate(2) == [6, 7], "what comes back is still lent"
    pool.release(mine)
    assert pool.num_available == 2, "and so is what was in use before"


def test_content_for_reuse_is_forgotten_when_blocks_are_lent() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(1)
    pool.register(b"x", blocks)
    pool.release(blocks)
    assert pool.lookup([b"x"]) == blocks
    pool.lend([])
    assert pool.lookup([b"x"]) == []
    assert (pool.num_available, pool.used_mask) == (0, 0)


def test_caches_of_two_layouts_share_the_slots_of_a_rank() -> None:
    sides = [Side((1, 4, 4)), Side((2, 4, 4))]
    slots = PagedKVCache(GQASpec(2, 3), InterleavedLayout(1, 4, 4), 2, 12, dtype=torch.float64)
    caches = [side.cache(0, 1) for side in sides]
    for cache, lent in zip(caches, ([0, 2, 4], [1, 3, 11]), strict=True):
        cache.share_slots(slots)
        cache.pool.lend(lent)
        cache.add("a")
    for _ in range(3):
        for cache, side in zip(caches, sides, strict=True):
            fill(cache, side, 0, "a", 4, len(side.layout) + side.ranks)
    for cache, side in zip(caches, sides, strict=True):
        check(cache, side, 0, "a", 0, len(side.layout) + side.ranks)
    assert caches[0].pool.used_mask & caches[1].pool.used_mask == 0
    with pytest.raises(ConfigError, match="begin empty"):
        caches[0].share_slots(slots)
    with pytest.raises(ConfigError, match="store the same"):
        Side((1, 4, 2)).cache(0, 1).share_slots(slots)


def test_a_trace_is_read_back(tmp_path: Path) -> None:
    lines = [{"event": "config", "sizes": [1, 2]}, {"event": "admit", "group": [0], "time": 0.25}]
    write_trace(tmp_path / "trace", lines)
    assert len((tmp_path / "trace").read_text().splitlines()) == 2
    assert read_trace(tmp_path / "trace") == lines


def test_a_budget_of_many_blocks_is_reported() -> None:
    """Ints of more than 4,300 decimal digits have no decimal text in Python."""
    config = ServingConfig(num_blocks=20_000, block_size=1, interleave_size=1, sizes=(1,))
    (done,) = Server(served(), config, num_replicas=1).run([Request("a", (1, 2, 3), 4)])
    assert len(done.new) == 4


class Uneven:
    """A spec whose planes have different numbers of heads, which cannot be cut."""

    planes = (Plane("k", 2, 3), Plane("index", 1, 5))
    value_dim = 3


def test_planes_of_different_heads_travel_whole() -> None:
    caches = [
        PagedKVCache(Uneven(), InterleavedLayout(n, 2, 4), 2, 9, dtype=torch.float64)
        for n in (1, 1)
    ]
    caches[0].add("a")
    plan = caches[0].plan([("a", 6)])
    for layer in range(2):
        keys, index = torch.rand(6, 2, 3).double(), torch.rand(6, 1, 5).double()
        for writes in plan.prefill_writes:
            caches[0].write(plan, layer, writes, keys, index)
    caches[0].commit(plan)
    caches[1].import_blocks("b", [caches[0].export_blocks("a")])
    slots = [caches[i].block_table(seq)[0] * 4 for i, seq in enumerate("ab")]
    for layer in range(2):
        pairs = zip(
            *(c.view(layer, slot, 4) for c, slot in zip(caches, slots, strict=True)), strict=True
        )
        assert all(torch.equal(a, b) and a.any() for a, b in pairs)
