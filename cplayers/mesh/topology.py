"""Who the ranks are: tensor, decode-context, prefill-context and data parallelism in plain ints.

Ranks are laid out ``(dp, pcp, tp)`` with tp fastest, so ``world_size = dp * pcp * tp``. Decode
context parallelism (DCP) adds no ranks: a DCP group takes the whole PCP axis first and then
``k = dcp / pcp`` neighbouring TP ranks. Nothing here needs a process group, or torch.

Axes::

    tp      weights are split over it
    pcp     the tokens of a prompt chunk are split over it
    dcp     the cached keys of a sequence are split over it
    dp      independent replicas
    dcp_tp  the k tp neighbours inside one DCP group (same pcp coordinate)
    tpa     the tp / k ranks with one place in their DCP groups: attention heads are split over it

Example: ``Topology(tp=2, dcp=4, pcp=2)`` has the DCP group ``[0, 2, 1, 3]``: transpose the
``(pcp, tp)`` grid ``[[0, 1], [2, 3]]`` and read it in runs of four.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from cplayers.errors import ConfigError

AXES = ("tp", "pcp", "dcp", "dp", "tpa", "dcp_tp")


class Coords(NamedTuple):
    """Place of a rank in the ``(dp, pcp, tp)`` grid."""

    dp: int
    pcp: int
    tp: int


@dataclass(frozen=True)
class Topology:
    """Degrees of parallelism.

    Args:
        tp: Tensor parallel degree.
        dcp: Decode context parallel degree: 1, or ``pcp * k`` with k dividing tp.
        pcp: Prefill context parallel degree.
        dp: Data parallel degree.

    Raises:
        ConfigError: A degree is not an int of at least 1. Combinations are judged by ``validate``,
            and by what needs them: ``dcp_tp``, ``tpa`` and the groups of dcp, tpa and dcp_tp.
    """

    tp: int = 1
    dcp: int = 1
    pcp: int = 1
    dp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "dcp", "pcp", "dp"):
            degree = getattr(self, name)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ConfigError(
                    f"{name}={degree!r}",
                    "a degree of parallelism is an int of at least 1",
                    f"pass {name}=1 to switch this axis off",
                )

    @property
    def world_size(self) -> int:
        """Number of ranks, ``dp * pcp * tp``."""
        return self.dp * self.pcp * self.tp

    @property
    def dcp_tp(self) -> int:
        """How many TP neighbours a DCP group spans (k); 1 when dcp is 1."""
        if self.dcp == 1:
            return 1
        k, rest = divmod(self.dcp, self.pcp)
        if rest or k == 0 or self.tp % k:
            raise ConfigError(
                f"dcp={self.dcp} with tp={self.tp}, pcp={self.pcp}",
                "dcp is 1, or pcp * k with k dividing tp",
                f"use dcp from {self.possible_dcp()}",
            )
        return k

    @property
    def tpa(self) -> int:
        """Width of head sharding during attention, ``tp / k``."""
        return self.tp // self.dcp_tp

    def possible_dcp(self) -> list[int]:
        """The values of dcp that this tp and pcp allow, whatever the model, ascending."""
        spans = (k for k in range(1, self.tp + 1) if self.tp % k == 0)
        return sorted({1, *(self.pcp * k for k in spans)})

    def size(self, axis: str) -> int:
        """Number of ranks in a group of ``axis``."""
        _check_axis(axis)
        degree: int = getattr(self, axis)
        return degree

    def coords(self, rank: int) -> Coords:
        """Place of ``rank`` in the ``(dp, pcp, tp)`` grid."""
        if not 0 <= rank < self.world_size:
            raise ConfigError(
                f"rank={rank}",
                f"{self} has the ranks 0 to {self.world_size - 1}",
                f"pass a rank below {self.world_size}",
            )
        return Coords(rank // (self.pcp * self.tp), rank // self.tp % self.pcp, rank % self.tp)

    def groups(self, axis: str) -> list[list[int]]:
        """All groups of ``axis``, rank order inside a group included.

        Groups come in the order of their first rank. A size-1 axis has one group per rank.

        Raises:
            ConfigError: Unknown axis, or an axis that depends on an impossible dcp.
        """
        return [list(group) for group in _groups(self, axis)]

    def group_of(self, rank: int, axis: str) -> list[int]:
        """The group of ``axis`` that ``rank`` is in."""
        self.coords(rank)
        return next(list(group) for group in _groups(self, axis) if rank in group)

    def rank_in(self, rank: int, axis: str) -> int:
        """Position of ``rank`` inside its group of ``axis``."""
        return self.group_of(rank, axis).index(rank)


def _check_axis(axis: str) -> None:
    if axis not in AXES:
        raise ConfigError(f"axis={axis!r}", "not an axis of a topology", f"use one of {AXES}")


@lru_cache(maxsize=256)
def _groups(topology: Topology, axis: str) -> tuple[tuple[int, ...], ...]:
    """Groups of an axis: ranks with equal keys, in the order in which the axis takes them."""
    _check_axis(axis)
    places = [(rank, topology.coords(rank)) for rank in range(topology.world_size)]
    if axis == "dcp" and topology.dcp > 1:
        # tp-major and pcp-minor: a group uses up the PCP axis before it takes a TP neighbour.
        places.sort(key=lambda place: (place[1].dp, place[1].tp, place[1].pcp))
    key = _axis_key(topology, axis)
    members: dict[Hashable, list[int]] = {}
    for rank, at in places:
        members.setdefault(key(rank, at), []).append(rank)
    return tuple(tuple(group) for group in members.values())


def _axis_key(topology: Topology, axis: str) -> Callable[[int, Coords], Hashable]:
    """What the ranks of one group of ``axis`` have in common."""
    if axis == "tp":
        return lambda rank, at: (at.dp, at.pcp)
    if axis == "pcp":
        return lambda rank, at: (at.dp, at.tp)
    if axis == "dp":
        return lambda rank, at: (at.pcp, at.tp)
    if axis == "dcp" and topology.dcp == 1:
        return lambda rank, at: rank
    k = topology.dcp_tp
    if axis == "dcp":
        return lambda rank, at: (at.dp, at.tp // k)
    if axis == "tpa":
        return lambda rank, at: (at.dp, at.pcp, at.tp % k)
    return lambda rank, at: (at.dp, at.pcp, at.tp // k)
