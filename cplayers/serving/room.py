"""Blocks at an agreed point: which are free on all members of a group, and which are spoken for.

The groups of different sizes store in the same slots of a rank. A block id is one place on every
rank, so a group of several replicas can take a block only where its id is free on all of them, and
takes it on all of them. Between two agreed points each group takes blocks on its own, from those
that it was lent at the first: hence nobody talks, and nobody takes what is another's.

Ids are lent from the low end to groups of one replica and from the high end to larger ones, so that
what is free on one replica tends to be free on its neighbours too.
"""

from __future__ import annotations

from collections.abc import Mapping

from cplayers.serving.requests import Replicas


class Room:
    """Free and promised blocks of each replica.

    Args:
        num_blocks: Blocks of a rank.
        used: Of each replica, a mask whose bit b says that block b is used.
    """

    def __init__(self, num_blocks: int, used: Mapping[int, int]) -> None:
        self.num_blocks = num_blocks
        self._free = {replica: ((1 << num_blocks) - 1) & ~mask for replica, mask in used.items()}
        self._promised = dict.fromkeys(used, 0)

    def promise(self, group: Replicas, blocks: int) -> None:
        """Count ``blocks`` as spoken for on every replica of ``group``; negative ones, as not."""
        for replica in group:
            self._promised[replica] += blocks

    def fits(self, group: Replicas, blocks: int) -> bool:
        """Whether ``blocks`` are left on every replica once all promises are kept."""
        left = (self._free[replica].bit_count() - self._promised[replica] for replica in group)
        return min(left) >= blocks and self.common(group) >= blocks

    def common(self, group: Replicas) -> int:
        """How many blocks are free on all replicas of ``group``."""
        return self._common(group).bit_count()

    def lend(self, group: Replicas, blocks: int) -> list[int]:
        """Take ``blocks`` ids that are free on all replicas of ``group``; there are as many."""
        common, ids = self._common(group), list[int]()
        for _ in range(blocks):
            bit = 1 << common.bit_length() - 1 if len(group) > 1 else common & -common
            common ^= bit
            ids.append(bit.bit_length() - 1)
        taken = self._common(group) ^ common
        for replica in group:
            self._free[replica] &= ~taken
        return ids

    def _common(self, group: Replicas) -> int:
        common = (1 << self.num_blocks) - 1
        for replica in group:
            common &= self._free[replica]
        return common
