"""What happens between two agreed points: a state machine in plain values, one on every rank.

All ranks feed it the same numbers, so that all copies of it take the same decisions:

    grow      requests that outgrew their group move to a larger one, while they decode
    admit     requests that wait go to the smallest group that suits them and has room
    rest      larger groups make no step where smaller ones have work and they had their share
    lend      every group gets the blocks that it may take until the next point

Where blocks are short, the request that arrived last gives way first: it moves to another group
that has room, or else gives its blocks back and is begun again later from its tokens. The one
that arrived first never gives way to another, so that every request comes to its end. A request
that was overtaken for ``patience`` points has room kept for it.
"""

from __future__ import annotations

from collections.abc import Mapping

from cplayers.serving.book import Book, Round
from cplayers.serving.config import ServingConfig
from cplayers.serving.fleet import Fleet
from cplayers.serving.lending import lend
from cplayers.serving.requests import Progress, Replicas
from cplayers.serving.room import Room
from cplayers.serving.shares import Shares


class Scheduler(Book):
    """Decides rounds.

    Args:
        config: Settings.
        fleet: The groups.
        dcp_per_replica: Ranks of one replica that share a sequence.
    """

    def __init__(self, config: ServingConfig, fleet: Fleet, dcp_per_replica: int = 1) -> None:
        super().__init__(config, fleet, dcp_per_replica)
        self._kept: list[Replicas] = []  # groups in which room is kept for a request
        self._shares = Shares(config.share, config.same_processors)
        self._usage: dict[int, int] = {}  # used blocks of each replica, as last logged

    def decide(self, now: float, used: Mapping[int, int], spent: Mapping[Replicas, float]) -> Round:
        """The next round.

        Args:
            now: Seconds after the start, as agreed.
            used: Of each replica, the mask of its used blocks.
            spent: Of each group that made steps in the last round, the seconds that they took.
        """
        self._shares.account(spent, now)
        self.now = now
        self.points += 1
        usage = {replica: mask.bit_count() for replica, mask in used.items()}
        if usage != self._usage:
            self._usage = usage
            self.log_usage(usage)
        room, result = Room(self.config.num_blocks, used), Round()
        for progress in self.placed:
            assert progress.group is not None
            room.promise(progress.group, self.promised(progress, progress.group))
        self._grow(room, result)
        self._admit(room, result)
        result.resting = self._shares.resting(self.busy)
        lend(self, room, result)
        result.lasts = self._shares.lasts(self.busy - result.resting)
        return result

    def _grow(self, room: Room, result: Round) -> None:
        """Move requests that outgrew their group, and those for which it had no blocks."""
        for progress in self.placed:
            group = progress.group
            if group is None:  # evicted just now, for an older one
                continue
            size, cramped = self.router.size_for(progress), progress.cramped
            progress.cramped = False
            if not cramped and (size <= len(group) or not progress.decodes):
                continue
            if progress.decodes and self._relocate(progress, max(size, len(group)), room, result):
                continue
            if cramped:
                self._make_room(progress, group, room, result)

    def _relocate(self, progress: Progress, size: int, room: Room, result: Round) -> bool:
        """Move a request to a group of at least ``size`` replicas that has room, if there is."""
        loads = self.router.loads(self.placed)
        for larger in [each for each in self.router.sizes if each >= size]:
            need = self.router.need(progress, larger)
            for target in self.router.candidates(larger, loads, near=progress.group or ()):
                if target != progress.group and self._may_join(target, need, room):
                    reason = f"{progress.length} tokens suit {size} replicas"
                    if size == len(progress.group or ()):
                        reason = "its group is short of blocks"
                    self.move(progress, target, room, result, reason)
                    return True
        return False

    def _make_room(self, progress: Progress, group: Replicas, room: Room, result: Round) -> None:
        """Blocks were short for ``progress``: it gives way to older ones, younger ones to it."""
        others = [p for p in self.placed if p.group and set(p.group) & set(group)]
        size = len(group)
        outgrown = (
            self.router.blocks(size, progress.cached + self.router.growth(progress, size))
            > self.config.num_blocks
        )
        moving = {name for name, _, _ in result.move}
        if outgrown or others[0] is not progress:
            self.evict(progress, room, result, "blocks are short")
        elif others[-1] is not progress and others[-1].request.name not in moving:
            self.evict(others[-1], room, result, f"{progress.request.name} came first")

    def _admit(self, room: Room, result: Round) -> None:
        self._kept = []
        loads = self.router.loads(self.placed)
        evicted = {name for name, _ in result.evict}
        for progress in self.waiting:
            if progress.request.name in evicted:
                continue  # its blocks are not everybody's yet
            size = self.router.size_for(progress)
            need = self.router.need(progress, size)
            groups = self.router.candidates(size, loads)
            group = next((g for g in groups if self._may_join(g, need, room)), None)
            if group is None:
                progress.waited += 1
                if progress.waited > self.config.patience:
                    self._kept.append(groups[0])
                continue
            room.promise(group, need)
            self.place(progress, group)
            progress.history.append(group)
            reason = f"{progress.length} tokens suit {size} replicas"
            self.log("admit", progress, group=group, reason=reason, waited=progress.waited)
            result.admit.append((progress.request.name, group))
            for replica in group:
                loads[replica] += progress.request.max_new_tokens

    def _may_join(self, group: Replicas, blocks: int, room: Room) -> bool:
        return (
            not any(set(group) & set(kept) for kept in self._kept)
            and self.num_running(group) < self.config.max_running
            and room.fits(group, blocks)
        )
