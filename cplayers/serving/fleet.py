"""Replicas and the groups that they form, before and after some are lost. Plain ints.

A replica is a run of ranks that hold the weights once: one rank, or tp of them. Groups of n
replicas are the runs of n neighbours, so that a group of four holds two groups of two. A replica is
in a group of every size at the same time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cplayers.errors import ConfigError
from cplayers.serving.requests import Replicas


@dataclass(frozen=True)
class Fleet:
    """The groups of replicas that are alive.

    Attributes:
        num_replicas: Replicas at the start.
        ranks_per_replica: Ranks of each.
        sizes: Replicas of a group, ascending.
        lost: Replicas that are gone.

    Raises:
        ConfigError: If a size is above the number of replicas or does not divide it.
    """

    num_replicas: int
    ranks_per_replica: int
    sizes: tuple[int, ...]
    lost: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if any(self.num_replicas % size for size in self.sizes):
            raise ConfigError(
                f"sizes={self.sizes} of {self.num_replicas} replicas",
                "each size of a group divides the number of replicas",
                "leave out the others",
            )

    @property
    def replicas(self) -> Replicas:
        """Those that are alive."""
        return tuple(r for r in range(self.num_replicas) if r not in self.lost)

    @property
    def groups(self) -> list[Replicas]:
        """All groups, largest first: those of the start that are whole, and one of what is left.

        What is left makes a group where it is larger than the whole ones, so that a request that
        needs the memory of several replicas finds it.
        """
        whole = [
            tuple(range(first, first + size))
            for size in reversed(self.sizes)
            for first in range(0, self.num_replicas, size)
            if self.lost.isdisjoint(range(first, first + size))
        ]
        left = self.replicas[: max(self.sizes)]
        if self.lost and max(map(len, whole), default=0) < len(left):
            whole.insert(0, left)
        return whole

    def ranks(self, group: Replicas) -> tuple[int, ...]:
        """Global ranks of a group, ascending."""
        n = self.ranks_per_replica
        return tuple(rank for replica in group for rank in range(replica * n, (replica + 1) * n))

    def replica(self, rank: int) -> int:
        """The replica that ``rank`` is in."""
        return rank // self.ranks_per_replica

    def without(self, ranks: Iterable[int]) -> Fleet:
        """What is left when ``ranks`` are lost: their replicas are, whole."""
        gone = self.lost | {self.replica(rank) for rank in ranks}
        return Fleet(self.num_replicas, self.ranks_per_replica, self.sizes, gone)
