"""Which group suits a request: by its length, by memory, and by how busy the groups are."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

from cplayers.cache import InterleavedLayout
from cplayers.serving.config import ServingConfig
from cplayers.serving.fleet import Fleet
from cplayers.serving.requests import Progress, Replicas


class Router:
    """Answers from numbers that all ranks know, so that all get the same ones.

    Args:
        config: Settings.
        fleet: The groups that there are.
        dcp_per_replica: Ranks of one replica that share a sequence (dcp / pcp).
    """

    def __init__(self, config: ServingConfig, fleet: Fleet, dcp_per_replica: int = 1) -> None:
        self.config, self.fleet, self._shared = config, fleet, dcp_per_replica

    @cached_property
    def sizes(self) -> list[int]:
        """Sizes of the groups that there are, ascending."""
        return sorted({len(group) for group in self.fleet.groups})

    def layout(self, size: int) -> InterleavedLayout:
        """How a group of ``size`` replicas spreads a sequence."""
        config = self.config
        return InterleavedLayout(size * self._shared, config.interleave_size, config.block_size)

    def blocks(self, size: int, length: int) -> int:
        """Blocks that ``length`` tokens take on each rank of a group of ``size`` replicas."""
        return self.layout(size).blocks(length)

    def expected(self, progress: Progress, size: int) -> int:
        """Tokens for which a group of ``size`` replicas promises room to a request.

        What there is and some headroom, and never less than what its next steps may fill. It does
        not depend on how much is cached, so that a request that begins again goes where it can end.
        """
        more = max(self.config.headroom, self.config.steps_of(size))
        return min(progress.length + more, progress.request.most_cached)

    def need(self, progress: Progress, size: int) -> int:
        """Blocks on each rank for what is `expected`."""
        return self.blocks(size, self.expected(progress, size))

    def can_end(self, progress: Progress) -> bool:
        """Whether some group can hold the request to its end, if it is alone there."""
        most = progress.request.most_cached
        return any(self.blocks(size, most) <= self.config.num_blocks for size in self.sizes)

    def size_for(self, progress: Progress) -> int:
        """The smallest size that the length prefers and whose memory holds what is expected.

        Where no group is that large, the largest that there is.
        """
        preferred = self.config.preferred(progress.length)
        fit = [s for s in self.sizes if self.need(progress, s) <= self.config.num_blocks]
        large = [size for size in fit if size >= preferred]
        return large[0] if large else (fit or self.sizes)[-1]

    def extra(self, group: Replicas) -> int:
        """Steps beyond the usual ones that ``group`` may make until the next point."""
        alone = len(self.fleet.ranks(group)) == 1
        return self.config.steps_of(1) * (self.config.stretch - 1) if alone else 0

    def growth(self, progress: Progress, size: int, extra: int = 0) -> int:
        """Most tokens that the request adds to the cache of such a group until the next point.

        Args:
            progress: The request.
            size: Replicas of the group.
            extra: Steps that decode only, after the others.
        """
        steps, chunk = self.config.steps_of(size), self.config.chunk_of(size)
        left = progress.length - progress.cached
        most = progress.request.most_cached - progress.cached
        return min(min(left - 1 + steps, chunk * steps) + extra, most)

    def loads(self, placed: Iterable[Progress]) -> dict[int, int]:
        """Steps that each replica still has to make, as far as can be known."""
        loads = dict.fromkeys(self.fleet.replicas, 0)
        for progress in placed:
            group = progress.group or ()
            for replica in group:
                left = progress.length - progress.cached
                loads[replica] += -(-left // self.config.chunk_of(len(group)))
                loads[replica] += progress.request.max_new_tokens - len(progress.new)
        return loads

    def candidates(self, size: int, loads: dict[int, int], near: Replicas = ()) -> list[Replicas]:
        """Groups of ``size`` replicas: those around ``near`` first, then the least busy.

        Among equals the smallest size begins at the first replica and larger ones at the last, so
        that they meet as late as they can.

        Args:
            size: Their size.
            loads: Of each replica.
            near: Replicas that hold the request now; what stays on them is not sent.
        """
        groups = sorted(group for group in self.fleet.groups if len(group) == size)
        if size > self.sizes[0]:
            groups.reverse()
        return sorted(groups, key=lambda g: (not set(near) <= set(g), max(loads[r] for r in g)))
