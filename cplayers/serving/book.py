"""The requests of a server and the log of what was decided: state in plain values.

Every rank keeps a copy, and all copies are alike, because all are told the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cplayers.serving.config import ServingConfig
from cplayers.serving.fleet import Fleet
from cplayers.serving.requests import Progress, Replicas, Request
from cplayers.serving.room import Room
from cplayers.serving.router import Router


@dataclass
class Round:
    """What the ranks do from one agreed point to the next.

    Attributes:
        admit: Requests that join a group.
        evict: Requests that give their blocks back, with the group that they leave.
        move: Requests that change group: name, from where, to where.
        lend: Blocks that each group may take.
        stalled: Requests that make no step, because blocks are short.
        freed: Blocks that each group has from requests that it evicts.
        resting: Groups that make no step.
        extra: Steps that a group may go on decoding for while others are busy.
        lasts: Seconds that the round should last.
    """

    admit: list[tuple[str, Replicas]] = field(default_factory=list)
    evict: list[tuple[str, Replicas]] = field(default_factory=list)
    move: list[tuple[str, Replicas, Replicas]] = field(default_factory=list)
    lend: dict[Replicas, list[int]] = field(default_factory=dict)
    stalled: set[str] = field(default_factory=set)
    freed: dict[Replicas, int] = field(default_factory=dict)
    resting: set[Replicas] = field(default_factory=set)
    extra: dict[Replicas, int] = field(default_factory=dict)
    lasts: float = 0.0


class Book:
    """Requests, where they are, and the decisions about them so far.

    Args:
        config: Settings.
        fleet: The groups.
        dcp_per_replica: Ranks of one replica that share a sequence.

    Attributes:
        router: Which group suits a request.
        requests: Every request, by name.
        unfinished: Those that are not over, by arrival.
        decisions: What was decided, in order, as plain values.
    """

    def __init__(self, config: ServingConfig, fleet: Fleet, dcp_per_replica: int = 1) -> None:
        self.config, self._shared = config, dcp_per_replica
        self.router = Router(config, fleet, dcp_per_replica)
        self.requests: dict[str, Progress] = {}
        self.unfinished: dict[str, Progress] = {}
        self._residents: dict[Replicas, dict[int, Progress]] = {}  # of each group, by number
        self.decisions: list[dict[str, Any]] = []
        self.points = 0
        self.now = 0.0

    def submit(self, request: Request, now: float) -> None:
        """Take a request in, or refuse it if no group can hold it to its end."""
        progress = Progress(request, len(self.requests))
        self.requests[request.name] = self.unfinished[request.name] = progress
        self.now = now
        self.log("arrive", progress)
        self._refuse_if_too_long(progress)

    def advance(self, name: str, cached: int, new: list[int], times: list[float]) -> None:
        """A group has computed more of a request.

        Args:
            name: The request.
            cached: Its tokens in the cache now.
            new: Tokens that were generated since the last call.
            times: When they were, in seconds after the start.
        """
        progress = self.requests[name]
        progress.cached = cached
        progress.new += new
        progress.times += times
        progress.waited = 0
        if progress.is_over:
            self.log("finish", progress, group=progress.group)
            progress.cached = 0
            self.place(progress, None)
            del self.unfinished[name]

    def lose(self, fleet: Fleet, intact: Mapping[str, Replicas], now: float) -> None:
        """Ranks are gone: requests that are not ``intact`` begin again from their tokens.

        Args:
            fleet: What is left.
            intact: Requests that are whole in a group of ``fleet``, with that group.
            now: Seconds after the start.
        """
        self.now = now
        gone = sorted(fleet.lost - self.router.fleet.lost)
        self.decisions.append(self._entry("lost", replicas=gone))
        self.router = Router(self.config, fleet, self._shared)
        for progress in self.placed:
            if progress.request.name in intact:
                self.place(progress, intact[progress.request.name])
                continue
            if progress.cached or progress.new:
                self.log("recompute", progress, group=progress.group, reason="lost ranks")
                self.begin_again(progress)
            else:  # it was about to begin
                self.log("postpone", progress, group=progress.group, reason="lost ranks")
                self.place(progress, None)
                progress.history.pop()
        for progress in self.waiting:
            self._refuse_if_too_long(progress)

    @property
    def placed(self) -> list[Progress]:
        """Requests that a group holds, by arrival."""
        held = [p for residents in self._residents.values() for p in residents.values()]
        return sorted(held, key=lambda progress: progress.number)

    @property
    def waiting(self) -> list[Progress]:
        """Requests that wait for a group, by arrival."""
        return [p for p in self.unfinished.values() if p.group is None]

    def running(self, group: Replicas) -> list[Progress]:
        """Requests that ``group`` holds, by arrival."""
        residents = self._residents.get(group, {})
        return [residents[number] for number in sorted(residents)]

    def num_running(self, group: Replicas) -> int:
        """How many requests ``group`` holds."""
        return len(self._residents.get(group, ()))

    @property
    def busy(self) -> set[Replicas]:
        """Groups that hold requests."""
        return {group for group, residents in self._residents.items() if residents}

    def place(self, progress: Progress, group: Replicas | None) -> None:
        """Say where a request is.

        Args:
            progress: The request.
            group: Its group, ``None`` where it waits or is over.
        """
        if progress.group is not None:
            del self._residents[progress.group][progress.number]
        if group is not None:
            self._residents.setdefault(group, {})[progress.number] = progress
        progress.group = group

    def promised(self, progress: Progress, group: Replicas) -> int:
        """Blocks beyond those that it has for which room is promised to a request of ``group``."""
        size = len(group)
        held = self.router.blocks(size, progress.cached)
        return max(0, self.router.need(progress, size) - held)

    def move(
        self, progress: Progress, target: Replicas, room: Room, result: Round, reason: str
    ) -> None:
        """Decide that a request changes group.

        Args:
            progress: The request.
            target: Its next group.
            room: Whose promises change.
            result: The round.
            reason: Why.
        """
        source = progress.group
        assert source is not None
        room.promise(source, -self.promised(progress, source))
        room.promise(target, self.router.need(progress, len(target)))
        self.log("migrate", progress, group=target, source=source, reason=reason)
        self.place(progress, target)
        progress.history.append(target)
        result.move.append((progress.request.name, source, target))

    def evict(self, progress: Progress, room: Room, result: Round, reason: str) -> None:
        """Decide that a request gives its blocks back; its own group may take them at once."""
        group = progress.group
        assert group is not None
        room.promise(group, -self.promised(progress, group))
        freed = self.router.blocks(len(group), progress.cached)
        result.freed[group] = result.freed.get(group, 0) + freed
        self.log("evict", progress, group=group, reason=reason)
        self.begin_again(progress)
        result.evict.append((progress.request.name, group))

    def begin_again(self, progress: Progress) -> None:
        """Let a request wait, to be computed again from its tokens; if it can end at all now."""
        self.place(progress, None)
        progress.cached, progress.cramped = 0, False
        progress.recomputed += 1
        self._refuse_if_too_long(progress)

    def _refuse_if_too_long(self, progress: Progress) -> None:
        if not self.router.can_end(progress):
            size = self.router.sizes[-1]
            progress.refused = (
                f"{progress.request.most_cached} tokens, if nothing stops it, need "
                f"{self.router.blocks(size, progress.request.most_cached)} blocks on each rank of "
                f"a group of {size}, which has {self.config.num_blocks}"
            )
            self.log("refuse", progress, reason=progress.refused)
            del self.unfinished[progress.request.name]

    def log(
        self,
        event: str,
        progress: Progress,
        *,
        group: Replicas | None = None,
        source: Replicas | None = None,
        reason: str = "",
        waited: int | None = None,
    ) -> None:
        """Append to ``decisions``.

        Args:
            event: What happened.
            progress: To which request.
            group: Where it is, or goes.
            source: Where it comes from.
            reason: Why.
            waited: Agreed points that it waited.
        """
        facts: dict[str, Any] = {"request": progress.request.name, "length": progress.length}
        if source is not None:
            facts["from"] = list(source)
        if group is not None:
            facts["group"] = list(group)
        if waited is not None:
            facts["waited"] = waited
        if reason:
            facts["reason"] = reason
        self.decisions.append(self._entry(event, **facts))

    def log_usage(self, blocks: Mapping[int, int]) -> None:
        """Append the used blocks of each replica to ``decisions``.

        Args:
            blocks: Of each replica.
        """
        replicas, used = list(blocks), list(blocks.values())
        self.decisions.append(self._entry("usage", replicas=replicas, used=used))

    def _entry(self, event: str, **facts: Any) -> dict[str, Any]:
        return {"point": self.points, "time": round(self.now, 4), "event": event, **facts}
