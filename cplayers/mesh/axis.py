"""One rank's group of one axis: the order of its rows, and how its operations are finished."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from cplayers.mesh.collectives import Wait
from cplayers.mesh.world import Partition, World


class Axis(NamedTuple):
    """This rank's group of one axis; ``world`` and ``group`` are absent where it is alone."""

    name: str
    ranks: tuple[int, ...]
    """Global ranks in topology order."""
    rank: int
    """Place of this rank among ``ranks``."""
    partition: Partition = ()
    """All groups of the axis."""
    world: World | None = None

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group; asked of the world each time, because only torch keeps it alive.

        Raises:
            StateError: It has been destroyed.
        """
        return None if self.world is None else self.world.group(self.partition)

    def to_torch_order(self, rows: Tensor) -> Tensor:
        """Rows of the topology's order in the ascending rank order that torch groups have."""
        return _reorder(rows, self.ranks, tuple(sorted(self.ranks)))

    def to_topology_order(self, rows: Tensor) -> Tensor:
        """The inverse of ``to_torch_order``."""
        return _reorder(rows, tuple(sorted(self.ranks)), self.ranks)

    def wait_for(self, x: Tensor, operation: str) -> Wait:
        """How a launched operation on x is finished: in slices on CPU, else left to the device."""
        if self.world is None or x.device.type != "cpu":
            return _wait_plainly
        health = self.world.health
        what = f"{operation} over {self.name}"
        return lambda work: health.wait(work, self.ranks, what)


def _reorder(rows: Tensor, old: tuple[int, ...], new: tuple[int, ...]) -> Tensor:
    if old == new:
        return rows
    # Not an index tensor, which would have to be copied to the device first.
    return torch.stack([rows[old.index(rank)] for rank in new])


def _wait_plainly(work: dist.Work) -> None:
    work.wait()
