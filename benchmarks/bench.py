"""What every benchmark needs to run: ranks, a budget, and somebody to tell how far it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from benchmarks.measure import Budget, take_turns
from benchmarks.results import READ, Case, size_of
from benchmarks.sites import Site
from cplayers.testing import RankPool

TOLERANCE = 1e-4
"""Largest difference of two fp32 answers, as a share of the largest value."""


class WrongAnswerError(RuntimeError):
    """A contestant found something else than the others: its time means nothing."""


@dataclass
class Bench:
    """The means of a run.

    Attributes:
        pool: Ranks.
        budget: Time and repeats of a contestant.
        threads: Threads of what runs in this process.
        tell: Is told what is running.
    """

    pool: RankPool
    budget: Budget
    threads: int
    tell: Callable[[str], None]

    def case(
        self,
        at: dict[str, int],
        sites: Sequence[Site],
        baseline: str,
        notes: dict[str, str] | None = None,
        *,
        bar: bool = False,
    ) -> Case:
        """Compare the answers of all contestants of a size, time them in turns, and drop them.

        ``bar`` says that a bar is about this size: it is timed for longer.
        """
        where = {name: site for site in sites for name in site.names}
        size = size_of(at)
        try:
            took = self.compare(where, size)

            def warm(name: str) -> float:
                # What takes long is warm and known from the call whose answer was compared.
                long = took[name] > self.budget.seconds
                return took[name] if long else where[name].seconds(name)

            timings = take_turns(
                {name: partial(site.seconds, name) for name, site in where.items()},
                partial(self.budget.repeats, bar=bar),
                warm,
                lambda what: self.tell(f"{size}: {what}"),
            )
        finally:
            for site in sites:
                site.drop()
        case = Case(at, timings, baseline, dict(notes or {}))
        if baseline == READ:
            case.baseline = case.fastest(READ) or READ
        return case

    def compare(self, where: dict[str, Site], size: str) -> dict[str, float]:
        """Raise WrongAnswerError unless all that answer find the same; seconds of each call."""
        took: dict[str, float] = {}
        reference: tuple[str, Tensor] | None = None
        for name, site in where.items():
            self.tell(f"{size}: {name}, comparing answers")
            start = time.perf_counter()
            answer = site.answer(name)
            took[name] = time.perf_counter() - start
            if answer is None:
                continue
            if reference is None:
                reference = name, answer
            difference = relative(answer, reference[1])
            if not difference <= TOLERANCE:
                raise WrongAnswerError(
                    f"at {size}, {name!r} differs from {reference[0]!r} by {difference:.2g} of the "
                    f"largest value, more than {TOLERANCE:g}"
                )
        return took


def relative(x: Tensor, reference: Tensor) -> float:
    """Largest difference as a share of the largest value; infinite where shapes differ."""
    if x.shape != reference.shape:
        return float("inf")
    worst = torch.nan_to_num((x - reference).abs().max() / reference.abs().max(), nan=torch.inf)
    return float(worst)
