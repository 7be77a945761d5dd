"""What a benchmark found: cases with times, and bars that they have to reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.measure import Timing

READ = "plain read"
"""Groups whose name begins so read bytes and do nothing else; of each group the fastest counts."""


def size_of(at: Mapping[str, int]) -> str:
    """A size in words, such as "1,024 keys, 1 rank"."""
    words = (f"{n:,} {what.removesuffix('s') if n == 1 else what}" for what, n in at.items())
    return ", ".join(words)


@dataclass
class Case:
    """Contestants that were timed in turns, on one size.

    Attributes:
        at: The size, such as keys and ranks.
        timings: Times by contestant.
        baseline: The contestant that ratios are taken over.
        notes: What else is to be said, by contestant: why it is missing, its rate, ...
    """

    at: dict[str, int]
    timings: dict[str, Timing]
    baseline: str
    notes: dict[str, str] = field(default_factory=dict)

    def median(self, name: str) -> float | None:
        timing = self.timings.get(name)
        return None if timing is None else timing.median

    def ratio(self, name: str, over: str | None = None) -> float | None:
        """Ratio of medians over the baseline, or over another contestant."""
        mine, other = self.median(name), self.median(self.baseline if over is None else over)
        return None if mine is None or other is None else mine / other

    def add_rates(self, amounts: Mapping[str, float], unit: str) -> None:
        """Note the rate of contestants whose work is known, by contestant or group."""
        for name, timing in self.timings.items():
            amount = amounts.get(name, amounts.get(group_of(name)))
            if amount is not None:
                self.notes[name] = f"{amount / timing.median / 1e9:.3g} G{unit}/s"

    def fastest(self, group: str) -> str | None:
        """Of the contestants called "group, ...", the one with the least median."""
        names = [name for name in self.timings if group_of(name) == group]
        return min(names, key=lambda name: self.timings[name].median, default=None)

    @property
    def shown(self) -> list[str]:
        """All contestants, but of each group of reads the fastest only."""
        return [
            name
            for name in self.timings
            if not name.startswith(READ) or name == self.fastest(group_of(name))
        ]


def group_of(name: str) -> str:
    """Of a contestant called "group, variant"."""
    return name.partition(", ")[0]


@dataclass
class Bar:
    """A value that is to be at most, or at least, a limit."""

    what: str
    value: float | None
    limit: float
    unit: str = "x"
    at_least: bool = False
    why: str = ""

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        reached = self.value >= self.limit if self.at_least else self.value <= self.limit
        return "pass" if reached else "short"


@dataclass
class Result:
    """One benchmark of a run."""

    name: str
    title: str
    cases: list[Case]
    bars: list[Bar]
    seconds: float = 0.0


def panels(result: Result) -> dict[str, list[Case]]:
    """Cases that differ in the number of keys only, by what is alike."""
    found: dict[str, list[Case]] = {}
    for case in result.cases:
        rest = {label: value for label, value in case.at.items() if label != "keys"}
        found.setdefault(size_of(rest) or "one process", []).append(case)
    return found


def label_of(name: str) -> str:
    """A contestant in a table or drawing over sizes: which read is fastest differs with them."""
    return group_of(name) if name.startswith(READ) else name


def find(cases: Sequence[Case], **at: int) -> Case | None:
    """The first case of a size."""
    return next((case for case in cases if at.items() <= case.at.items()), None)


def to_json(result: Result) -> dict[str, Any]:
    """As plain values; medians and quartiles beside all times, verdicts beside the bars."""
    data = asdict(result)
    for case, plain in zip(result.cases, data["cases"], strict=True):
        for name, timing in case.timings.items():
            first, third = timing.quartiles
            plain["timings"][name] |= {"median": timing.median, "quartiles": [first, third]}
    for bar, plain in zip(result.bars, data["bars"], strict=True):
        plain["verdict"] = bar.verdict
    return data


def from_json(data: Mapping[str, Any]) -> Result:
    """The inverse of `to_json`."""
    cases = [
        Case(
            case["at"],
            {name: Timing(timing["seconds"]) for name, timing in case["timings"].items()},
            case["baseline"],
            case["notes"],
        )
        for case in data["cases"]
    ]
    bars = [
        Bar(**{name: value for name, value in bar.items() if name != "verdict"})
        for bar in data["bars"]
    ]
    return Result(data["name"], data["title"], cases, bars, data["seconds"])
