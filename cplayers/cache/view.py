"""One rank's view of a step: who it is, and where rows go in its cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from cplayers.cache.layouts import InterleavedLayout, require_positive
from cplayers.errors import ConfigError
from cplayers.ops import Spans, spans

SEGMENTS_MAX = 8
"""Up to so many consecutive segments are copied one by one; beyond, one indexed copy is cheaper."""


@dataclass(frozen=True)
class RankView:
    """What distinguishes one rank's plan from another's."""

    layout: InterleavedLayout
    cp_rank: int
    pcp_rank: int
    pcp_size: int
    device: torch.device

    def __post_init__(self) -> None:
        require_positive("pcp_size", self.pcp_size)
        for name, rank, size in (
            ("cp_rank", self.cp_rank, self.layout.cp_size),
            ("pcp_rank", self.pcp_rank, self.pcp_size),
        ):
            if not 0 <= rank < size:
                raise ConfigError(
                    f"{name}={rank}", f"a rank of a group of {size} is 0..{size - 1}", "pass one"
                )

    def spans(self, positions: Tensor, window: int | None) -> Spans:
        """What queries see of the keys that this rank owns of their sequence.

        Args:
            positions: Of the queries, int `[T]`.
            window: Sliding window, or ``None``.
        """
        return spans(positions, lambda n: self.layout.count_before(n, self.cp_rank), window)


@dataclass(frozen=True)
class Writes:
    """Which K/V rows go to which slots: as consecutive segments, or as index tensors.

    Of ``slots`` without ``rows``, there is one for each row, -1 for those that go nowhere.

    Attributes:
        segments: ``(first row, last row + 1, first slot)``.
        rows: Row indices, where there are too many segments; else ``None``.
        slots: Slot of each of ``rows``, or of each row.
    """

    segments: tuple[tuple[int, int, int], ...] = ()
    rows: Tensor | None = None
    slots: Tensor | None = None

    @classmethod
    def of(cls, slot_mapping: Tensor, device: torch.device) -> Writes:
        """From a slot per row, -1 for rows that are not written here.

        Segments and lists of rows spare a CPU what it need not touch. Elsewhere one kernel looks at
        the slot of every row, and nothing is left to the host.

        Args:
            slot_mapping: On the host, `[T]`.
            device: Of the cache.
        """
        if device.type != "cpu":
            return cls(slots=slot_mapping.to(device))
        rows = (slot_mapping >= 0).nonzero().squeeze(1)
        if not len(rows):
            return cls()
        slots = slot_mapping[rows]
        if len(rows) == 1:  # one sequence that decodes: not worth the machinery below
            return cls(((int(rows), int(rows) + 1, int(slots)),))
        breaks = ((rows.diff() != 1) | (slots.diff() != 1)).nonzero().squeeze(1) + 1
        if len(breaks) >= SEGMENTS_MAX:
            return cls(rows=rows.to(device), slots=slots.to(device))
        edges = [0, *breaks.tolist(), len(rows)]
        starts = list(zip(rows[edges[:-1]].tolist(), slots[edges[:-1]].tolist(), strict=True))
        return cls(
            tuple(
                (row, row + stop - start, slot)
                for (row, slot), start, stop in zip(starts, edges[:-1], edges[1:], strict=True)
            )
        )
