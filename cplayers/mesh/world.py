"""Process groups, opened once per default process group however many meshes are built on it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from cplayers.mesh.health import Health

Partition = tuple[tuple[int, ...], ...]
"""All ranks of the world, cut into groups."""


class World:
    """What belongs to one default process group: its groups and the health of its ranks.

    Groups are kept by partition, which is the same on all ranks, so that all ranks open the same
    groups in the same order.
    """

    def __init__(self, size: int, rank: int) -> None:
        self.health = Health(rank, size, _get_default_store())
        self._whole = tuple(range(size))
        self._groups: dict[Partition, dist.ProcessGroup] = {}

    def open(self, partitions: Iterable[Partition], subject: str) -> None:
        """Open the groups that are missing, once all ranks have come to open the same ones."""
        self.health.meet(subject)
        for partition in partitions:
            if partition not in self._groups and partition != (self._whole,):
                for ranks in partition:
                    group = dist.new_group(list(ranks))
                    if self.health.rank in ranks:
                        self._groups[partition] = cast("dist.ProcessGroup", group)

    def adopt(self, partition: Partition, group: dist.ProcessGroup) -> None:
        """Use a group that exists already."""
        if partition != (self._whole,):
            self._groups.setdefault(partition, group)

    def group(self, partition: Partition) -> dist.ProcessGroup:
        """This rank's group of an open partition; torch orders its ranks ascending."""
        if partition == (self._whole,):
            # Not kept in here: this object lives only as long as the default group does.
            return default_group()
        return self._groups[partition]


_worlds: WeakKeyDictionary[dist.ProcessGroup, World] = WeakKeyDictionary()


def default_group() -> dist.ProcessGroup:
    """The default process group, which must be initialised."""
    return cast("dist.ProcessGroup", dist.group.WORLD)


def current_world() -> World:
    """The world of the default process group, which must be initialised."""
    group = default_group()
    if group not in _worlds:
        _worlds[group] = World(dist.get_world_size(), dist.get_rank())
    return _worlds[group]
