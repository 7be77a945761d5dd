"""Meshes over some of the ranks, and over those that are left when one is lost.

    pairs = [((0, 1), Topology(pcp=2, dcp=2)), ((2, 3), Topology(pcp=2, dcp=2))]
    meshes = meshes_over(pairs)        # on ranks 0..3 alike; None for the pair one is not in

Such a mesh has process groups and a health of its own: what fails in it ends the waiting of its
members and nobody else's. All ranks once belong to one default process group; that group is never
used for a collective here, and need not be whole any more.

After a failure the ranks that live find each other again::

    except RankFailedError:
        ranks = regroup(ranks, generation + 1)             # on every rank that lives
        meshes = meshes_over(..., generation=generation + 1)

This asks more of the store of the default process group than a run without failures: it must
outlive every rank. A file store does, and so does one that a launcher serves; one that rank 0
serves does not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from cplayers.errors import ConfigError, RankFailedError
from cplayers.mesh.health import MEET_S, SETTLE_S, Health
from cplayers.mesh.mesh import CPMesh, partition_of
from cplayers.mesh.topology import AXES, Topology
from cplayers.mesh.world import Partition, World, current_world

POLL_S = 0.02
"""How often a rank looks whether the others have come."""


class Subset(World):
    """Some ranks of the default process group, as a world of their own in which they count from 0.

    Args:
        ranks: Their global ranks, ascending; this rank is one of them.
        generation: Tells apart groups of the same ranks before and after a failure.
    """

    def __init__(self, ranks: tuple[int, ...], generation: int) -> None:
        name = f"cplayers/subset/{generation}/{'-'.join(map(str, ranks))}"
        self.ranks, self.generation = ranks, generation
        here = ranks.index(current_world().health.rank)
        store = PrefixStore(name, _get_default_store())
        self.health = Health(here, len(ranks), store, names=ranks)
        self._groups: WeakValueDictionary[Partition, dist.ProcessGroup] = WeakValueDictionary()

    def open(self, partitions: Iterable[Partition], subject: str) -> None:
        """Wait until all members have come; `meshes_over` has opened the groups."""
        self.health.meet(subject)


_subsets: WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, tuple[int, ...]], Subset]]
_subsets = WeakKeyDictionary()


def _known() -> dict[tuple[int, tuple[int, ...]], Subset]:
    """Subsets of the default process group by generation and ranks: made once each."""
    return _subsets.setdefault(cast("dist.ProcessGroup", dist.group.WORLD), {})


def meshes_over(
    groups: Sequence[tuple[Sequence[int], Topology]],
    device_type: str = "cpu",
    *,
    generation: int = 0,
) -> list[CPMesh | None]:
    """A mesh for each group of ranks; called once a generation, alike on all ranks that live.

    Args:
        groups: Global ranks, ascending, which is how torch numbers the members of a group, and
            their topology: its rank i is the i-th of them. Groups may overlap.
        device_type: Where tensors live.
        generation: Counts up with every loss of a rank.

    Returns:
        This rank's meshes, ``None`` for the groups that it is not in.

    Raises:
        ConfigError: The ranks of a group are not those of its topology; before any is opened.
    """
    for ranks, topology in groups:
        if list(ranks) != sorted(set(ranks)) or len(ranks) != topology.world_size:
            raise ConfigError(
                f"ranks={tuple(ranks)} for {topology}",
                f"the topology has {topology.world_size} ranks, ascending and each of them once",
                "pass as many ranks in ascending order, or another topology",
            )
    opened: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    meshes: list[CPMesh | None] = []
    for ranks, topology in groups:
        members = tuple(ranks)
        world = _open(members, topology, generation, opened) if len(members) > 1 else None
        here = current_world().health.rank if dist.is_initialized() else members[0]
        mesh = CPMesh(topology, device_type, world=world) if here in members else None
        meshes.append(mesh)
    return meshes


def _open(
    members: tuple[int, ...],
    topology: Topology,
    generation: int,
    opened: dict[tuple[int, ...], dist.ProcessGroup | None],
) -> Subset | None:
    """Open the process groups of a topology that are not yet; the members' world on members."""
    known, here = _known(), current_world().health.rank
    world = None
    if here in members:
        world = known.setdefault((generation, members), Subset(members, generation))
    for partition in {partition_of(topology, axis): None for axis in AXES}:
        for group in partition:
            ranks = tuple(members[rank] for rank in group)
            if len(ranks) == 1:
                continue
            if ranks not in opened:
                # By every rank: torch numbers groups by how many a process has seen. It does not
                # wait for those that are not in the group.
                made = dist.new_group(list(ranks), timeout=timedelta(seconds=MEET_S))
                opened[ranks] = cast("dist.ProcessGroup", made) if here in ranks else None
            made = opened[ranks]
            if world is not None and made is not None:
                world.adopt(partition, made)
    return world


def regroup(ranks: Sequence[int], generation: int, limit_s: float = SETTLE_S) -> tuple[int, ...]:
    """Agree with those of ``ranks`` that live on who they are, after one of them was lost.

    All waiting in meshes over subsets ends first, on every rank that waits for this one; these
    meshes cannot be used any more. A rank that neither comes nor is known to have ended is waited
    for, and left behind when the time is up.

    Args:
        ranks: Global ranks before the loss, alike on all.
        generation: Of the meshes that come next, alike on all.
        limit_s: How long to wait for a rank of which nothing is known.

    Returns:
        The ranks that go on, in the order of ``ranks``; alike on all of them.

    Raises:
        RankFailedError: This rank came too late and was left behind.
    """
    here, reason = current_world().health.rank, f"ranks regroup to generation {generation}"
    for world in _known().values():
        if world.generation < generation:
            world.health.leave(reason)
    store = PrefixStore(f"cplayers/regroup/{generation}", _get_default_store())
    store.set(str(here), "here")
    worlds = [world for world in _known().values() if world.generation < generation]
    deadline = time.monotonic() + limit_s
    while not store.check(["agreed"]):
        came = [rank for rank in ranks if store.check([str(rank)])]
        absent = [rank for rank in ranks if rank not in came and not _is_gone(rank, worlds)]
        if not absent or time.monotonic() > deadline:
            store.compare_set("agreed", "", json.dumps(came))  # the first to say so decides
        time.sleep(POLL_S)
    agreed = tuple(json.loads(store.get("agreed")))
    if here not in agreed:
        raise RankFailedError(
            f"rank {here} came too late: ranks {agreed} go on without it. Remedy: end this process",
            here,
        )
    return agreed


def _is_gone(rank: int, worlds: Iterable[Subset]) -> bool:
    """Whether the process of ``rank`` has ended, as far as this one knows it."""
    mine = [world for world in worlds if rank in world.ranks]
    return any(world.health.is_gone(world.ranks.index(rank)) for world in mine)
