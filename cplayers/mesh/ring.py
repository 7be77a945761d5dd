"""Passing tensors round the members of an axis, one hop at a time and behind compute.

    ring = Ring(mesh, "pcp")
    for hop in range(ring.hops):
        ring.send_recv(keys, values)      # what goes on to the next member
        ring.commit()                     # on its way
        ... attend to keys, values ...    # meanwhile
        keys, values = ring.wait()        # what the previous member had

After h hops a member holds what the member h places before it began with.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cplayers.errors import ConfigError, StateError
from cplayers.mesh.collectives import Hop
from cplayers.mesh.mesh import CPMesh


class Ring:
    """Tensors passed round an axis; all members make the same calls with the same shapes.

    Args:
        mesh: The ranks.
        axis: Round which they go.
    """

    def __init__(self, mesh: CPMesh, axis: str) -> None:
        self.mesh, self.axis = mesh, axis
        self._given: tuple[Tensor, ...] = ()
        self._hop: Hop | None = None

    @property
    def hops(self) -> int:
        """Hops after which every member has seen what all began with."""
        return self.mesh.size(self.axis) - 1

    def source(self, hop: int) -> int:
        """Place on the axis of the member whose tensors are here after ``hop`` hops."""
        return (self.mesh.rank(self.axis) - hop) % self.mesh.size(self.axis)

    def send_recv(self, *tensors: Tensor) -> None:
        """Name the tensors of the next hop; they travel as one message, of one dtype.

        Raises:
            StateError: If the last hop has not been waited for, or tensors are named already.
            ConfigError: If none are given, or of several dtypes.
        """
        self._require(self._hop is None, "wait() for the hop that is under way")
        self._require(not self._given, "commit() the tensors that are named already")
        if len({tensor.dtype for tensor in tensors}) != 1:
            raise ConfigError(
                f"tensors of dtypes {[tensor.dtype for tensor in tensors]}",
                "a hop carries one or more tensors of one dtype",
                "send other dtypes in hops of their own",
            )
        self._given = tensors

    def commit(self) -> None:
        """Send them, and begin to receive the previous member's.

        Raises:
            StateError: If no tensors are named.
        """
        self._require(self._hop is None, "wait() for the hop that is under way")
        self._require(bool(self._given), "name tensors with send_recv() first")
        given = self._given
        parts = [tensor.reshape(-1) for tensor in given]
        flat = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._hop = self.mesh.shift(flat, self.axis)

    def wait(self) -> tuple[Tensor, ...]:
        """The previous member's tensors, of the shapes of those sent.

        Raises:
            StateError: If no hop is under way.
            RankFailedError: If a member failed.
        """
        if self._hop is None:
            raise self._misuse("commit() a hop first")
        received, given = self._hop.wait(), self._given
        self._hop, self._given = None, ()
        parts = torch.split(received, [tensor.numel() for tensor in given])
        return tuple([p.view(t.shape) for p, t in zip(parts, given, strict=True)])

    def _require(self, condition: bool, remedy: str) -> None:
        if not condition:
            raise self._misuse(remedy)

    def _misuse(self, remedy: str) -> StateError:
        return StateError(f"a ring over {self.axis} is used out of order; remedy: {remedy}")
