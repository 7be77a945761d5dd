"""A topology on live ranks: process groups by axis, and collectives by axis.

A collective takes a tensor and returns a new one; an axis of size 1 makes it the identity, needs no
process group and records no traffic. Rows come in the rank order of ``Topology.groups``::

    all_gather(x, axis)      [...]    -> [n, ...]  row i is member i's x
    all_to_all(x, axis)      [n, ...] -> [n, ...]  row i goes to, and comes from, member i
    reduce_scatter(x, axis)  [n, ...] -> [...]     this member's row, summed over members
    all_reduce(x, axis, op)  [...]    -> [...]     sum or maximum over members
    shift(x, axis)           [...]    -> [...]     the previous member's x, once waited for

x has one shape and dtype on all members, and any strides. A rank that fails while others wait makes
them raise ``RankFailedError``: at once when its connection breaks, in a few seconds when it raises
inside ``guard``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from cplayers.errors import ConfigError
from cplayers.mesh import collectives
from cplayers.mesh.axis import Axis
from cplayers.mesh.collectives import Hop
from cplayers.mesh.topology import AXES, Topology
from cplayers.mesh.traffic import TrafficLog, sent_bytes
from cplayers.mesh.world import Partition, World, current_world

GRID = ("dp", "pcp", "tp")
"""Dimensions of the device mesh, slowest first."""


class CPMesh:
    """Process groups and collectives of a topology.

    Args:
        topology: Degrees of parallelism, equal on all ranks.
        device_type: Where tensors live, e.g. ``"cpu"`` or ``"cuda"``.
        world: Whose groups to use where these are not all ranks, see `cplayers.mesh.meshes_over`.

    Raises:
        ConfigError: torch.distributed is not initialised with ``topology.world_size`` ranks (one
            rank needs none), the ranks disagree on the topology, or dcp is impossible.
    """

    def __init__(
        self, topology: Topology, device_type: str = "cpu", *, world: World | None = None
    ) -> None:
        self.topology = topology
        self.device_type = _device_type(device_type)
        self.traffic = TrafficLog()
        self.rank_global = 0
        self._world: World | None = None
        partitions = {axis: partition_of(topology, axis) for axis in AXES}
        if topology.world_size > 1:
            if world is None:
                _check_world_size(topology)
            self._world = world or current_world()
            self._world.open(partitions.values(), f"CPMesh({topology})")
            self.rank_global = self._world.health.rank
        self._replica = [
            rank
            for rank in range(topology.world_size)
            if topology.coords(rank).dp == topology.coords(self.rank_global).dp
        ]
        self._axes = {axis: self._axis(axis, partitions[axis]) for axis in AXES}
        self._device_mesh: DeviceMesh | None = None

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh, *, dcp: int = 1) -> CPMesh:
        """A mesh that reuses the process groups of a torch device mesh over all ranks.

        Args:
            device_mesh: Its dimensions are named by a subset of ``("dp", "pcp", "tp")``.
            dcp: Decode context parallel degree.

        Raises:
            ConfigError: Other names, or ranks that are not laid out dp, pcp, tp with tp fastest.
        """
        names = device_mesh.mesh_dim_names
        if not names or not set(names) <= set(GRID):
            raise ConfigError(
                f"mesh_dim_names={names}",
                f"dimensions are named by a subset of {GRID}",
                "pass mesh_dim_names to init_device_mesh, e.g. ('pcp', 'tp')",
            )
        sizes = dict(zip(names, device_mesh.shape, strict=True))
        topology = Topology(**sizes, dcp=dcp)
        in_grid_order = device_mesh.mesh.permute([names.index(n) for n in GRID if n in names])
        if in_grid_order.flatten().tolist() != list(range(topology.world_size)):
            raise ConfigError(
                f"device mesh {device_mesh.mesh.tolist()} with dimensions {names}",
                "ranks 0, 1, 2, ... are laid out dp, pcp, tp with tp fastest",
                f"use init_device_mesh with mesh_dim_names={tuple(n for n in GRID if n in names)}",
            )
        if topology.world_size > 1:
            _check_world_size(topology)
            for name in names:
                current_world().adopt(partition_of(topology, name), device_mesh.get_group(name))
        return cls(topology, device_mesh.device_type)

    @property
    def device_mesh(self) -> DeviceMesh:
        """The torch device mesh with dimensions dp, pcp, tp. Needs more than one rank."""
        if self._world is None:
            raise ConfigError(
                "device_mesh of a mesh with one rank",
                "one rank has no process groups to make a device mesh of",
                "ask only where topology.world_size is above 1",
            )
        if self._device_mesh is None:
            shape = [self.size(name) for name in GRID]
            self._device_mesh = DeviceMesh.from_group(
                [self._world.group(partition_of(self.topology, name)) for name in GRID],
                self.device_type,
                torch.tensor(self._world.ranks, dtype=torch.int).view(shape),
                mesh_dim_names=GRID,
            )
        return self._device_mesh

    def tp_mesh(self) -> DeviceMesh:
        """The 1-D device mesh over tp, as torch.distributed.tensor.parallel wants it."""
        return self.device_mesh["tp"]

    def size(self, axis: str) -> int:
        """Number of ranks in this rank's group of ``axis``."""
        return self.topology.size(axis)

    def rank(self, axis: str) -> int:
        """Place of this rank in its group of ``axis``."""
        self.topology.size(axis)
        return self._axes[axis].rank

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of ``axis``.

        torch numbers its ranks in ascending order, which for dcp is not the order of
        ``topology.group_of``; the collectives of this class reorder rows for you.

        Raises:
            ConfigError: The axis has size 1.
            StateError: The group has been destroyed.
        """
        self.topology.size(axis)
        group = self._axes[axis].group
        if group is None:
            raise ConfigError(
                f"group({axis!r}) of {self.topology}",
                "an axis of size 1 has no process group",
                f"ask size({axis!r}) first, or use the mesh's collectives, which need no group",
            )
        return group

    def all_gather(self, x: Tensor, axis: str) -> Tensor:
        """Every member's x ``[...]``, stacked in rank order: ``[n, ...]``."""
        return self.start_all_gather(x, axis).wait()

    def start_all_gather(self, x: Tensor, axis: str) -> Hop:
        """The same in the background."""
        at = self._start(x, axis, "all_gather")
        if at.group is None:
            return Hop(x[None])
        if x.numel() == 0:
            return Hop(x.new_empty((len(at.ranks), *x.shape)))
        wait = at.wait_for(x, "all_gather")
        return collectives.all_gather(x, at.group, wait, at.to_topology_order)

    def all_to_all(self, x: Tensor, axis: str) -> Tensor:
        """Send row i of x ``[n, ...]`` to member i; row i of the result came from member i."""
        return self.start_all_to_all(x, axis).wait()

    def start_all_to_all(self, x: Tensor, axis: str) -> Hop:
        """The same in the background."""
        self._check_rows(x, axis, "all_to_all")
        at = self._start(x, axis, "all_to_all")
        if at.group is None:
            return Hop(x)
        if x.numel() == 0:
            return Hop(torch.empty_like(x))
        wait, sent = at.wait_for(x, "all_to_all"), at.to_torch_order(x)
        return collectives.all_to_all(sent, at.group, wait, at.to_topology_order)

    def reduce_scatter(self, x: Tensor, axis: str) -> Tensor:
        """Sum over members of x ``[n, ...]``, of which member r gets row r: ``[...]``."""
        self._check_rows(x, axis, "reduce_scatter")
        at = self._start(x, axis, "reduce_scatter")
        if at.group is None:
            return x[0]
        if x.numel() == 0:
            return x.new_empty(x.shape[1:])
        sent = at.to_torch_order(x)
        return collectives.reduce_scatter(sent, at.group, at.wait_for(x, "reduce_scatter"))

    def all_reduce(self, x: Tensor, axis: str, op: str = "sum") -> Tensor:
        """Sum (``op="sum"``) or maximum (``op="max"``) of x over members."""
        if op not in ("sum", "max"):
            raise ConfigError(f"op={op!r}", "op is one of ('sum', 'max')", "pass op='sum'")
        at = self._start(x, axis, "all_reduce")
        if at.group is None:
            return x
        if x.numel() == 0:
            return torch.empty_like(x)
        return collectives.all_reduce(x, at.group, at.wait_for(x, "all_reduce"), op)

    def shift(self, x: Tensor, axis: str) -> Hop:
        """Send x to the next member and receive the previous one's, in the background."""
        at = self._start(x, axis, "shift")
        if at.group is None or x.numel() == 0:
            return Hop(x)
        places = [sorted(at.ranks).index(rank) for rank in at.ranks]
        after, before = places[(at.rank + 1) % len(places)], places[at.rank - 1]
        return collectives.shift(x, at.group, at.wait_for(x, "shift"), after, before)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Around a step: an exception inside is told to the other ranks of this replica.

        After an exception, the next guard or collective first makes sure that all ranks of the
        replica raised as well; where they did not, the groups are out of step.

        Raises:
            RankFailedError: An earlier failure has put the groups out of step.
        """
        if self._world is None:
            yield
        else:
            with self._world.health.guard(self._replica):
                yield

    def __repr__(self) -> str:
        degrees = ", ".join(f"{axis}={self.size(axis)}" for axis in ("tp", "dcp", "pcp", "dp"))
        return f"CPMesh({degrees}, rank={self.rank_global}, device_type={self.device_type!r})"

    def __deepcopy__(self, memo: dict[int, object]) -> CPMesh:
        # A copy of a layer talks over the same groups; process groups cannot be copied.
        return self

    def _axis(self, axis: str, partition: Partition) -> Axis:
        ranks = next(group for group in partition if self.rank_global in group)
        if self._world is None or len(ranks) == 1:
            return Axis(axis, ranks, ranks.index(self.rank_global))
        return Axis(axis, ranks, ranks.index(self.rank_global), partition, self._world)

    def begin(self, axis: str, operation: str, sent: int) -> Axis:
        """Before a collective of one's own: check that the axis may be used, record the traffic."""
        self.topology.size(axis)
        at = self._axes[axis]
        if at.world is not None:
            at.world.group(at.partition)  # raises where it is gone, before anything is recorded
            at.world.health.ready(self._replica)
            self.traffic.record(axis, operation, sent)
        return at

    def _start(self, x: Tensor, axis: str, operation: str) -> Axis:
        return self.begin(axis, operation, sent_bytes(operation, x.nbytes, self.size(axis)))

    def _check_rows(self, x: Tensor, axis: str, operation: str) -> None:
        n = self.size(axis)
        if x.ndim == 0 or x.shape[0] != n:
            raise ConfigError(
                f"{operation} of shape {tuple(x.shape)} over {axis}",
                f"the first dimension has one row for each of the {n} members",
                f"pass a tensor of shape [{n}, ...]",
            )


def partition_of(topology: Topology, axis: str) -> Partition:
    """All groups of ``axis``, hashable."""
    return tuple(tuple(group) for group in topology.groups(axis))


def _device_type(device_type: str) -> str:
    try:
        return torch.device(device_type).type
    except RuntimeError as error:
        raise ConfigError(
            f"device_type={device_type!r}", "names a torch device type", "pass 'cpu' or 'cuda'"
        ) from error


def _check_world_size(topology: Topology) -> None:
    started = dist.get_world_size() if dist.is_initialized() else None
    if started != topology.world_size:
        have = "is not initialised" if started is None else f"has {started} ranks"
        n = topology.world_size
        raise ConfigError(
            f"{topology} with torch.distributed that {have}",
            f"the topology has dp * pcp * tp = {n} ranks",
            f"start {n} processes, e.g. torchrun --nproc-per-node {n}, and call "
            "torch.distributed.init_process_group in each",
        )
