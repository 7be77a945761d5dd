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

A rank may be lost at any time, also while the others regroup or open their groups. Connecting
happens inside torch, where nobody looks whether the others live: so the members of a mesh meet
first, who can be told of a failure, and then connect at once or not at all.

This asks more of the store of the default process group than a run without failures: it must
outlive every rank. A file store does, and so does one that a launcher serves; one that rank 0
serves does not.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store, _world

from cplayers.errors import ConfigError, RankFailedError
from cplayers.mesh.health import MEET_S, SETTLE_S, Health
from cplayers.mesh.mesh import CPMesh, partition_of
from cplayers.mesh.process import ProcessId
from cplayers.mesh.topology import AXES, Topology
from cplayers.mesh.world import Partition, World, current_world

POLL_S = 0.02
"""How often a rank looks whether the others have come."""
CONNECT_S = 2.0
"""How long ranks that have met may take to connect after a loss: as many times this as there were
losses, so that a slow machine comes through in the end. A rank that dies meanwhile is noticed when
it is over; gloo tries five times where it had found that rank's address already."""
SPARE_NAMES = 1000
"""Names of groups that are passed over after a loss: ranks that are gone may have used them."""


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
        store, processes = PrefixStore(name, _get_default_store()), _known().processes
        self.health = Health(here, len(ranks), store, ranks, processes)
        self._groups: WeakValueDictionary[Partition, dist.ProcessGroup] = WeakValueDictionary()

    def open(self, partitions: Iterable[Partition], subject: str) -> None:
        """Nothing is left to do: `meshes_over` has opened the groups."""


class Known(NamedTuple):
    """What this process knows of the ranks of one default process group.

    Attributes:
        subsets: By generation and ranks: made once each.
        processes: By global rank, of those that it has met.
    """

    subsets: dict[tuple[int, tuple[int, ...]], Subset]
    processes: dict[int, ProcessId]


_knowledge: WeakKeyDictionary[dist.ProcessGroup, Known] = WeakKeyDictionary()


def _known() -> Known:
    return _knowledge.setdefault(cast("dist.ProcessGroup", dist.group.WORLD), Known({}, {}))


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
        RankFailedError: A member failed, or did not come. None of these meshes can be used.
    """
    for ranks, topology in groups:
        if list(ranks) != sorted(set(ranks)) or len(ranks) != topology.world_size:
            raise ConfigError(
                f"ranks={tuple(ranks)} for {topology}",
                f"the topology has {topology.world_size} ranks, ascending and each of them once",
                "pass as many ranks in ascending order, or another topology",
            )
    started = dist.is_initialized()
    # All before any is opened: where this rank fails, the members of the later ones are told, too.
    worlds = [_world_of(tuple(ranks), generation) if started else None for ranks, _ in groups]
    opened: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
    meshes: list[CPMesh | None] = []
    try:
        for (ranks, topology), world in zip(groups, worlds, strict=True):
            if started and len(ranks) > 1:
                _open(tuple(ranks), topology, world, generation, opened)
            member = not started or current_world().health.rank in ranks
            meshes.append(CPMesh(topology, device_type, world=world) if member else None)
    except BaseException as error:
        for world in worlds:
            if world is not None:
                world.health.leave(f"opening its generation ended with {type(error).__name__}")
        raise
    return meshes


def _world_of(members: tuple[int, ...], generation: int) -> Subset | None:
    """The world of a group that this rank is in, if there are others."""
    if len(members) == 1 or current_world().health.rank not in members:
        return None
    subsets, key = _known().subsets, (generation, members)
    if key not in subsets:
        subsets[key] = Subset(members, generation)
    return subsets[key]


def _open(
    members: tuple[int, ...],
    topology: Topology,
    world: Subset | None,
    generation: int,
    opened: dict[tuple[int, ...], dist.ProcessGroup | None],
) -> None:
    """Open the process groups of a topology that are not yet; ``world`` is there on members."""
    if world is not None:
        world.health.meet(f"CPMesh({topology})")
    for partition in {partition_of(topology, axis): None for axis in AXES}:
        for group in partition:
            ranks = tuple(members[rank] for rank in group)
            if len(ranks) == 1:
                continue
            if ranks not in opened:
                opened[ranks] = _connect(ranks, world, generation)
            made = opened[ranks]
            if world is not None and made is not None:
                world.adopt(partition, made)


def _connect(
    ranks: tuple[int, ...], world: Subset | None, generation: int
) -> dist.ProcessGroup | None:
    """A process group, on its members. Called by every rank that lives.

    torch numbers groups by how many a process has seen, so all must see them. It does not wait for
    those that are not in the group, nor look for failures: hence the short time.
    """
    limit_s = CONNECT_S * generation or MEET_S
    try:
        made = dist.new_group(list(ranks), timeout=timedelta(seconds=limit_s))
    except RuntimeError as error:
        if world is None:
            raise
        world.health.explain(range(len(world.ranks)), f"connecting ranks {ranks}", error)
    if current_world().health.rank not in ranks:
        return None
    group = cast("dist.ProcessGroup", made)
    group.set_timeout(timedelta(seconds=MEET_S))  # of its operations
    return group


def regroup(
    ranks: Sequence[int], generation: int, limit_s: float = SETTLE_S, busy_s: float = MEET_S
) -> tuple[int, ...]:
    """Agree with those of ``ranks`` that live on who they are, after one of them was lost.

    All waiting in meshes over subsets ends first, on every rank that waits for this one; these
    meshes cannot be used any more. A rank that does not come is left behind at once where its
    process is known to have ended, or where it said that it does not come; else when its time is
    up.

    Args:
        ranks: Global ranks before the loss, alike on all.
        generation: Of the meshes that come next, alike on all.
        limit_s: Seconds to wait for a rank of which nothing is known: on another host.
        busy_s: Seconds to wait for a rank whose process is known to live; it may be amid a long
            step.

    Returns:
        The ranks that go on, in the order of ``ranks``; alike on all of them.

    Raises:
        RankFailedError: This rank came too late and was left behind.
    """
    here, known = current_world().health.rank, _known()
    reason = f"ranks regroup to generation {generation}. Go on with its meshes, or its server"
    for world in known.subsets.values():
        if world.generation < generation:
            world.health.leave(reason)
    store = _words(generation)
    store.set(str(here), json.dumps([_world.group_count, ProcessId.current()]))
    began = time.monotonic()
    while not store.check(["agreed"]):
        waited = time.monotonic() - began
        said = {rank: word for rank in ranks if (word := _word(store, rank))}
        if all(rank in said or waited > _limit(rank, limit_s, busy_s) for rank in ranks):
            came = {rank: word for rank in ranks if (word := json.loads(said.get(rank, "null")))}
            store.compare_set("agreed", "", json.dumps(list(came.items())))  # the first decides
        time.sleep(POLL_S)
    agreed = dict(json.loads(store.get("agreed")))
    if here not in agreed:
        raise RankFailedError(
            f"rank {here} came too late: ranks {tuple(agreed)} go on without it. "
            "Remedy: end this process",
            here,
        )
    # Where ranks were amid opening groups, they have seen different numbers of them.
    count = max(seen for seen, _ in agreed.values()) + SPARE_NAMES
    _world.group_count = max(_world.group_count, count)  # above it where they agreed before
    known.processes.update({rank: ProcessId(*process) for rank, (_, process) in agreed.items()})
    return tuple(agreed)


def withdraw(generation: int) -> None:
    """Say that this rank does not come to the next `regroup`, because it has raised.

    Args:
        generation: The one to which the others regroup next.
    """
    if dist.is_initialized():
        _words(generation).set(str(current_world().health.rank), json.dumps(None))


def come_back(generation: int) -> None:
    """Take back what `withdraw` said.

    Args:
        generation: As it was said there.
    """
    if dist.is_initialized():
        _words(generation).set(str(current_world().health.rank), "")


def _words(generation: int) -> PrefixStore:
    """Where ranks say that they come, or that they do not."""
    return PrefixStore(f"cplayers/regroup/{generation}", _get_default_store())


def _word(store: PrefixStore, rank: int) -> str:
    return store.get(str(rank)).decode() if store.check([str(rank)]) else ""


def _limit(rank: int, limit_s: float, busy_s: float) -> float:
    """Seconds for which a rank that says nothing is waited for."""
    process = _known().processes.get(rank)
    if process is None:
        return limit_s
    return -1.0 if process.is_gone() else busy_s if process.is_alive() else limit_s
