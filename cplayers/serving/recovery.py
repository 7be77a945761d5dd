"""How the ranks that live go on after one was lost.

1. regroup   all waiting ends, and they agree on who is left.
2. rebuild   process groups and meshes of what is left, anew, because old ones are out of step.
3. catch up  a rank may have died amid the exchange of an agreed point, which has then come to an
             end on some ranks only. Those tell the others what was said, so that all have taken the
             same decisions.
4. settle    every rank tells which requests it holds, and how far. A request is whole where every
             rank of a group that is left holds it; the ranks go back to where the one that is
             furthest behind is, which is one step at most. All other requests begin again.

The exchange of 4 is an agreed point like those of a round: where a rank dies amid it, the others
begin with 1 again, and 3 tells those that are behind what they missed. No two ranks are ever more
than one point apart, because an exchange needs every rank to have come to it.

A rank that raises while its process lives is lost as well. It says so as it leaves, so that nobody
waits for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from cplayers.mesh import CPMesh, gather_bytes, regroup
from cplayers.mesh.subset import come_back, withdraw
from cplayers.serving.fleet import Fleet
from cplayers.serving.requests import Progress, Replicas
from cplayers.serving.runner import Runner
from cplayers.serving.scheduler import Scheduler

TRIES = 3
"""How often in a row the ranks regroup without having lost one, before the failure is raised."""

Report = dict[str, tuple[int, list[int], list[float]]]
"""By request: tokens in the cache, and what was generated since the last agreed point, and when."""


class Whole(NamedTuple):
    """A request that survived, and how far all ranks of its group had come.

    Attributes:
        group: Where it is.
        cached: Tokens in the cache.
        new: Tokens that were generated since the last agreed point.
        times: When.
    """

    group: Replicas
    cached: int
    new: list[int]
    times: list[float]


class Past:
    """What one rank remembers of the agreed points.

    Args:
        ranks: Global ranks at the start.

    Attributes:
        ranks: Global ranks that went on when the ranks regrouped last.
        generation: How often they did.
        point: Agreed points so far: of rounds, and after losses.
        said: What was said at the last one, by rank.
        vain: How often in a row they have settled without having lost a rank and without a round
            in between that all came through.
    """

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.generation = self.point = self.vain = 0
        self.said: list[bytes] = []
        self._lost: list[int] = []
        self._away = False

    def add(self, said: Sequence[bytes]) -> None:
        """Remember an agreed point."""
        if is_loss(said):
            lost = json.loads(said[0])["lost"]
            self.vain = self.vain + 1 if lost == self._lost else 0
            self._lost = lost
        elif not is_loss(self.said):
            self.vain = 0
        self.point, self.said = self.point + 1, list(said)

    def regroup(self) -> tuple[int, ...]:
        """Step 1: the global ranks that are left."""
        self.generation += 1
        self.ranks = regroup(self.ranks, self.generation)
        return self.ranks

    def catch_up(self, council: CPMesh) -> list[bytes] | None:
        """Step 3: what was said at a point that came to its end on other ranks only.

        Args:
            council: The ranks that live.

        Returns:
            What was said at the next point, ``None`` where this rank knows of the last one.
        """
        mine = {"point": self.point, "said": [text.decode() for text in self.said]}
        told = [
            json.loads(text) for text in gather_bytes(council, json.dumps(mine).encode(), "pcp")
        ]
        newest = max(told, key=lambda each: each["point"])
        if newest["point"] == self.point:
            return None
        return [text.encode() for text in newest["said"]]

    @contextmanager
    def leaving(self) -> Iterator[None]:
        """Around all that a rank serves: an exception that leaves it is said to the others."""
        try:
            yield
        except BaseException:
            # Also KeyboardInterrupt and SystemExit: the others would wait all the same.
            withdraw(self.generation + 1)
            self._away = True
            raise

    def stay(self) -> None:
        """Before a round: this rank serves again, where all had raised alike."""
        if self._away:
            come_back(self.generation + 1)
            self._away = False


def hold(fleet: Fleet, held: Mapping[Replicas, Report]) -> bytes:
    """What a rank says in step 4.

    Args:
        fleet: What is left.
        held: What this rank holds, by group.
    """
    groups = [[list(group), report] for group, report in held.items()]
    return json.dumps({"lost": sorted(fleet.lost), "held": groups}).encode()


def is_loss(said: Sequence[bytes]) -> bool:
    """Whether this was said in step 4, and not at the agreed point of a round."""
    return bool(said) and said[0].startswith(b'{"lost":')


def settle(said: Sequence[bytes], scheduler: Scheduler, runners: dict[Replicas, Runner]) -> None:
    """The end of step 4, alike on all ranks: what is whole goes on, all else begins again.

    Args:
        said: What every rank said.
        scheduler: The requests.
        runners: This rank's groups; those that are not whole are taken out.
    """
    told: list[dict[str, Any]] = [json.loads(text) for text in said]
    fleet = replace(scheduler.router.fleet, lost=frozenset(told[0]["lost"]))
    whole = compare(fleet, scheduler.placed, [each["held"] for each in told])
    intact = {name: each.group for name, each in whole.items()}
    scheduler.lose(fleet, intact, scheduler.now)
    for name, each in whole.items():
        scheduler.advance(name, each.cached, each.new, each.times)
    for group in runners.keys() - set(fleet.groups):
        del runners[group]
    for group, runner in runners.items():
        for name in list(runner.residents):
            progress = scheduler.requests[name]
            if progress.group == group:
                runner.restore(name, whole[name].cached, progress.new)
            else:
                runner.leave(name)


def compare(
    fleet: Fleet, placed: Iterable[Progress], told: Sequence[Sequence[tuple[Sequence[int], Report]]]
) -> dict[str, Whole]:
    """Requests that every rank of some group holds.

    Args:
        fleet: What is left.
        placed: Requests that a group should hold.
        told: Of each rank of ``fleet``, its groups with what it holds there.
    """
    held: dict[tuple[Replicas, int], Report] = {}
    for rank, reports in zip(fleet.ranks(fleet.replicas), told, strict=True):
        for members, report in reports:
            held[tuple(members), rank] = report
    found = {}
    for progress in placed:
        name, at = progress.request.name, progress.group
        # the group where it should be first: it may have been amid a move
        for group in sorted(fleet.groups, key=lambda group: group != at):
            shares = [held.get((group, rank), {}).get(name) for rank in fleet.ranks(group)]
            whole = [share for share in shares if share is not None]
            if len(whole) == len(shares):
                cached = min(share[0] for share in whole)
                _, new, times = min(whole, key=lambda share: len(share[1]))
                found[name] = Whole(group, cached, new, times)
                break
    return found
