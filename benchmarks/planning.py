"""The plan of a decode step: what it costs the host, once per step, for all layers.

It should not grow with the context. All contexts take turns in one run, so that they can be
compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.bench import Bench
from benchmarks.measure import Timing
from benchmarks.results import Bar, Case
from benchmarks.settings import Planning
from benchmarks.sites import Contestant, Here
from cplayers import GQASpec, InterleavedLayout, PagedKVCache
from cplayers.cache import StepPlan

TITLE = "Plan of a decode step"
PLAN, READS = "plan", "plan, and what rows read"


def contestants(requests: int, contexts: tuple[int, ...], block_size: int) -> dict[str, Contestant]:
    found = {}
    for keys in contexts:
        cache = shared(requests, keys, block_size)
        step = [(i, 1) for i in range(requests)]

        def plan(cache: PagedKVCache = cache, step: list[tuple[int, int]] = step) -> StepPlan:
            return cache.plan(step)

        found[f"{PLAN}/{keys}"] = Contestant(plan)
        found[f"{READS}/{keys}"] = Contestant(lambda plan=plan: plan().paged())
    return found


def shared(requests: int, keys: int, block_size: int) -> PagedKVCache:
    """Requests with ``keys`` tokens each, of which all but the last few are the same blocks."""
    blocks = -(-keys // block_size) + requests
    cache = PagedKVCache(
        GQASpec(1, 2), InterleavedLayout(1, block_size, block_size), 1, blocks + requests
    )
    start = keys - block_size // 2  # in whole blocks: forks then take a block of their own
    start -= start % block_size
    cache.add(0)
    cache.commit(cache.plan([(0, start)]))
    for i in range(1, requests):
        cache.fork(0, i)
    cache.commit(cache.plan([(i, keys - start - 1) for i in range(requests)]))
    return cache


def run(bench: Bench, settings: Planning) -> Iterator[Case]:
    contexts = tuple(settings.keys)
    site = Here(1, contestants, settings.requests, contexts, settings.block_size)
    case = bench.case({"requests": settings.requests}, [site], PLAN, bar=True)
    for keys in contexts:
        timings: dict[str, Timing] = {
            name: case.timings[f"{name}/{keys}"] for name in (PLAN, READS)
        }
        yield Case({"requests": settings.requests, "keys": keys}, timings, PLAN)


def bars(cases: Sequence[Case], settings: Planning) -> list[Bar]:
    result = []
    for name in (PLAN, READS):
        times = {case.at["keys"]: case.timings[name].median for case in cases}
        what = f"{name}, {settings.requests} requests"
        shortest, longest = min(times, default=0), max(times, default=0)
        flat = times[longest] / times[shortest] if times else None
        result += [
            Bar(f"{what}, the slowest context", max(times.values(), default=0) * 1e3, 1.0, "ms"),
            Bar(f"{what}, {longest:,} tokens over {shortest:,}", flat, 1.25),
        ]
    return result
