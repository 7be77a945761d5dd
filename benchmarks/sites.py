"""Where contestants run: in this process with several threads, or on ranks with one thread each.

A *factory* builds the contestants of one case, and is called where they run; what it holds is
dropped before the next case. On ranks all begin at one instant of the machine's monotonic clock,
and a call lasts until the last rank has finished.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cplayers import CPMesh, Topology
from cplayers.testing import RankPool

START_TOGETHER_S = 1e-3
"""Longer than gloo takes to agree on when to begin."""
CALL_S = 900.0
"""Deadline of one call on the ranks, building included."""


class Contestant(NamedTuple):
    """Something to time.

    Attributes:
        run: One call.
        answer: The value of ``run`` as a tensor to compare with the other contestants', or ``None``
            for what answers nothing, such as a plain read.
        place: Where this rank's answer lies in dimension 0 of the whole; ``None``: it is whole.
        until: When the timed part ended on the clock of ``time.perf_counter``; ``None``: at the
            end of the call.
    """

    run: Callable[[], Any]
    answer: Callable[[Any], Tensor] | None = None
    place: Tensor | None = None
    until: Callable[[], float] | None = None


Factory = Callable[..., dict[str, Contestant]]


class Site(Protocol):
    """Contestants that were built somewhere."""

    names: tuple[str, ...]

    def seconds(self, name: str) -> float:
        """Time one call."""
        ...

    def answer(self, name: str) -> Tensor | None:
        """The whole answer of a call, put together from the ranks."""
        ...

    def drop(self) -> None:
        """Release what the contestants hold."""
        ...


class Here:
    """Contestants in this process."""

    def __init__(self, threads: int, factory: Factory, *args: Any) -> None:
        self._threads = threads
        with _threads(threads), torch.no_grad():
            self._held = factory(*args)
        self.names = tuple(self._held)

    def seconds(self, name: str) -> float:
        with _threads(self._threads), torch.no_grad():
            return _timed(self._held[name], time.perf_counter())

    def answer(self, name: str) -> Tensor | None:
        contestant = self._held[name]
        with _threads(self._threads), torch.no_grad():
            value = contestant.run()
            return None if contestant.answer is None else contestant.answer(value)

    def drop(self) -> None:
        self._held = {}
        gc.collect()


class OnRanks:
    """Contestants on the first ``n`` ranks of a pool; the factory is called with n first."""

    def __init__(self, pool: RankPool, n: int, factory: Factory, *args: Any) -> None:
        self._pool, self._n = pool, n
        self.names: tuple[str, ...] = self._call(_build, n, factory, args)[0]

    def seconds(self, name: str) -> float:
        return max(self._call(_once, self._n, name))

    def answer(self, name: str) -> Tensor | None:
        parts: Sequence[tuple[Tensor, Tensor | None] | None] = self._call(_answer, name)
        if parts[0] is None:
            return None
        first, place = parts[0]
        if place is None:
            return first
        placed = [part for part in parts if part is not None]
        whole = first.new_full((sum(len(part) for part, _ in placed), *first.shape[1:]), torch.nan)
        for part, place in placed:
            whole[place] = part
        return whole

    def drop(self) -> None:
        self._call(_drop)

    def _call(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        return self._pool.run(fn, *args, n=self._n, timeout=CALL_S)


_held: dict[str, Contestant] = {}
_clock: list[CPMesh] = []


def _build(n: int, factory: Factory, args: tuple[Any, ...]) -> tuple[str, ...]:
    _drop()
    _clock[:] = [CPMesh(Topology(pcp=n))]
    with torch.no_grad():
        _held.update(factory(n, *args))
    return tuple(_held)


def _once(n: int, name: str) -> float:
    now = torch.tensor([time.perf_counter() + START_TOGETHER_S], dtype=torch.float64)
    start = float(_clock[0].all_gather(now, "pcp").max())
    while time.perf_counter() < start:
        pass
    with torch.no_grad():
        return _timed(_held[name], start)


def _answer(name: str) -> tuple[Tensor, Tensor | None] | None:
    contestant = _held[name]
    with torch.no_grad():
        value = contestant.run()
        if contestant.answer is None:
            return None
        return contestant.answer(value).contiguous(), contestant.place


def _drop() -> None:
    _held.clear()
    _clock.clear()
    gc.collect()


def _timed(contestant: Contestant, start: float) -> float:
    contestant.run()
    end = time.perf_counter()
    return (end if contestant.until is None else contestant.until()) - start


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
