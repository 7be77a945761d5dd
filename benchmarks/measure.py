"""Timing of contestants that take turns, so that noise of the machine meets all alike."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field


@dataclass
class Budget:
    """How long each contestant of a size is timed, and how often at least and at most."""

    seconds: float
    bar_seconds: float
    """Of the sizes that bars are about."""
    min_repeats: int
    max_repeats: int

    def repeats(self, seconds_each: float, bar: bool) -> int:
        """Repeats of something that takes ``seconds_each``."""
        seconds = self.bar_seconds if bar else self.seconds
        fit = int(seconds / max(seconds_each, 1e-9))
        return max(self.min_repeats, min(self.max_repeats, fit))


@dataclass
class Timing:
    """Repeated times of one contestant, in seconds."""

    seconds: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third."""
        if len(self.seconds) < 2:
            return self.seconds[0], self.seconds[0]
        first, _, third = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return first, third

    @property
    def spread(self) -> float:
        """Interquartile range as a share of the median."""
        first, third = self.quartiles
        return (third - first) / self.median


def schedule(repeats: Mapping[str, int]) -> Iterator[str]:
    """Turns, spread evenly: who has fewer repeats sits out rounds all through the run.

    The order within a round alternates, so that nobody always comes after the same other.
    """
    rounds = max(repeats.values())
    for turn in range(rounds):
        names = list(repeats)
        for name in names if turn % 2 == 0 else reversed(names):
            count = repeats[name]
            if math.floor((turn + 1) * count / rounds) > math.floor(turn * count / rounds):
                yield name


def take_turns(
    contestants: Mapping[str, Callable[[], float]],
    repeats_of: Callable[[float], int],
    warm: Callable[[str], float],
    tell: Callable[[str], None] = lambda _: None,
) -> dict[str, Timing]:
    """Times of all contestants, taken in turns.

    Each contestant returns the seconds of one call. ``warm`` runs one before and returns its
    seconds, from which ``repeats_of`` tells how often to time it; ``tell`` is told what is running.
    """
    estimates = {}
    for name in contestants:
        tell(f"{name}, warming up")
        estimates[name] = warm(name)
    repeats = {name: repeats_of(seconds) for name, seconds in estimates.items()}
    timings = {name: Timing() for name in contestants}
    for name in schedule(repeats):
        tell(f"{name}, {len(timings[name].seconds) + 1} of {repeats[name]}")
        timings[name].seconds.append(contestants[name]())
    return timings
