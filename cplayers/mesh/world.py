"""Process groups, opened once per default process group however many meshes are built on it.

torch owns the groups, and ``destroy_process_group`` is to close them: a group's destructor waits
for the threads of its backend. So groups are only looked at from here. A mesh that kept them alive
would leave those threads running into the end of the interpreter (see ``cplayers.mesh.lent``).
"""

from __future__ import annotations

import atexit
from collections.abc import Iterable
from functools import cache
from typing import cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from cplayers.errors import StateError
from cplayers.mesh import lent
from cplayers.mesh.health import Health

Partition = tuple[tuple[int, ...], ...]
"""All ranks of the world, cut into groups."""

LINGER_S = 2.0
"""How long a rank that ends waits at most for its backend to give back what it was lent."""


class World:
    """What belongs to one default process group: its groups and the health of its ranks.

    Groups are kept by partition, which is the same on all ranks, so that all ranks open the same
    groups in the same order.
    """

    def __init__(self, default: dist.ProcessGroup) -> None:
        self.ranks = tuple(range(default.size()))
        self.health = Health(default.rank(), default.size(), _get_default_store())
        self._groups: WeakValueDictionary[Partition, dist.ProcessGroup] = WeakValueDictionary()
        self._groups[(self.ranks,)] = default

    def open(self, partitions: Iterable[Partition], subject: str) -> None:
        """Open the groups that are missing, once all ranks have come to open the same ones."""
        self.health.meet(subject)
        for partition in partitions:
            if partition not in self._groups:
                for ranks in partition:
                    group = dist.new_group(list(ranks))
                    if self.health.rank in ranks:
                        self._groups[partition] = cast("dist.ProcessGroup", group)

    def adopt(self, partition: Partition, group: dist.ProcessGroup) -> None:
        """Use a group that exists already."""
        self._groups.setdefault(partition, group)

    def group(self, partition: Partition) -> dist.ProcessGroup:
        """This rank's group of an open partition; torch orders its ranks ascending.

        Raises:
            StateError: The group has been destroyed.
        """
        group = self._groups.get(partition)
        if group is None:
            raise StateError(
                "a mesh is used after its process groups were destroyed; remedy: use it before "
                "destroy_process_group, or build a new CPMesh after init_process_group"
            )
        return group


_worlds: WeakKeyDictionary[dist.ProcessGroup, World] = WeakKeyDictionary()


def world_size() -> int:
    """Ranks of the default process group; 1 where there is none."""
    return dist.get_world_size() if dist.is_initialized() else 1


def current_world() -> World:
    """The world of the default process group, which must be initialised."""
    group = cast("dist.ProcessGroup", dist.group.WORLD)
    if group not in _worlds:
        _linger_at_exit()
        _worlds[group] = World(group)
    return _worlds[group]


@cache
def _linger_at_exit() -> None:
    # Not at import: a program without process groups ends as if this module were not there.
    atexit.register(_linger)


def _linger() -> None:
    """Let the backends' threads finish, while they still can: also where no group was destroyed."""
    # Where ranks are out of step, an operation may be pending that never ends.
    in_step = all(world.health.in_step == "yes" for world in _worlds.values())
    lent.wait_for_return(LINGER_S if in_step else 0.0)
