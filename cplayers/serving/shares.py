"""How groups share time: larger ones rest where smaller ones have work; one rank goes on meanwhile.

    share     A step of a larger group takes all its replicas from the smaller groups there. Where
              these have work, the larger one is in debt for its time, makes no step while it is,
              and pays back ``share`` of the time that passes. So short requests seldom wait for a
              long one, which always gets its share, and all the time that nobody else wants.
              Replicas on the same processors take time from each other wherever they are.
    stretch   All ranks meet at the next agreed point, and who has less to do waits there. A group
              of one rank may decide by its own clock how many steps it makes: it goes on decoding
              until the busiest replica should be done. Larger groups would have to talk about it.

Times are what groups said at agreed points, so that all ranks count alike.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from cplayers.serving.requests import Replicas


class Shares:
    """Who rests, and how long a round lasts.

    Args:
        share: Part of the time of its replicas that a larger group may take from smaller ones.
        same_processors: Whether all replicas run on the same processors.
    """

    def __init__(self, share: float, same_processors: bool = False) -> None:
        self._share, self._same_processors = share, same_processors
        self._now = 0.0
        self._took: dict[Replicas, float] = {}  # seconds of its steps of a round, when it last ran
        self._debt: dict[Replicas, float] = {}
        self._rivalled: set[Replicas] = set()  # larger groups that others waited for

    def account(self, spent: Mapping[Replicas, float], now: float) -> None:
        """Count the round that has just ended.

        Args:
            spent: Seconds of each group's steps.
            now: Seconds after the start, as agreed.
        """
        self._took |= spent
        for group in self._rivalled & set(spent):
            self._debt[group] = self._debt.get(group, 0.0) + spent[group]
        paid, self._now = self._share * (now - self._now), now
        self._debt = {group: debt - paid for group, debt in self._debt.items() if debt > paid}

    def resting(self, busy: Collection[Replicas]) -> set[Replicas]:
        """Groups that make no step in the next round.

        Args:
            busy: Groups that have requests.
        """
        self._rivalled = {
            large
            for large in busy
            for small in busy
            if len(small) < len(large) and (self._same_processors or set(small) < set(large))
        }
        return {group for group in self._rivalled if group in self._debt}

    def lasts(self, busy: Iterable[Replicas]) -> float:
        """Seconds that the next round should last, by what its groups took the last time.

        Args:
            busy: Groups that make steps.
        """
        replicas: dict[int, float] = {}
        for group in busy:
            for replica in group:
                replicas[replica] = replicas.get(replica, 0.0) + self._took.get(group, 0.0)
        return max(replicas.values(), default=0.0)
