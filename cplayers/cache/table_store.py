"""The block tables of all sequences as one tensor, which kernels look up.

    table   int32 [S, B] on the device: row s has the block ids of one sequence, in order

A step changes only the ends of tables, so only those are written: whatever lies before the first
block that was not full before a step is as an earlier step wrote it. Entries beyond a sequence's
blocks hold anything; no span reaches them. The tensor is one buffer, renewed only to grow, so that a
captured graph finds it where it was.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from cplayers.cache.tables import Request


class TableStore:
    """Block tables on a device.

    Args:
        device: Where kernels read them.

    Attributes:
        table: The tensor, with at least one row and one column.
    """

    def __init__(self, device: torch.device) -> None:
        self.table = torch.zeros(1, 1, dtype=torch.int32, device=device)
        self._rows: dict[Hashable, int] = {}
        self._free = [0]

    def load(self, requests: Sequence[Request]) -> list[int]:
        """Write what a step changes, and return the row of each request's sequence.

        Args:
            requests: With the blocks that they have in the step.
        """
        rows: list[int] = []
        ids: list[int] = []
        at: list[int] = []  # row and column of each id, as one index: they are few
        self._reserve(requests)
        width = self.table.shape[1]
        for request in requests:
            row, first = self._rows.get(request.seq), request.first_open
            if row is None:
                row, first = self._free.pop(), 0
                self._rows[request.seq] = row
            rows.append(row)
            if first < request.blocks.size:
                ids += request.blocks.since(first)
                at += range(row * width + first, row * width + request.blocks.size)
        if ids:
            device = self.table.device
            index = torch.tensor(at, device=device)
            self.table.view(-1)[index] = torch.tensor(ids, dtype=torch.int32, device=device)
        return rows

    def reserve(self, sequences: int, blocks: int) -> None:
        """Grow to so many rows and columns at once, so that the tensor stays where it is."""
        height, width = self.table.shape
        self._resize(max(height, sequences), max(width, blocks))

    def drop(self, seq: Hashable) -> None:
        """Forget a sequence; one of the same name begins anew."""
        row = self._rows.pop(seq, None)
        if row is not None:
            self._free.append(row)

    def _reserve(self, requests: Sequence[Request]) -> None:
        """Grow to a row for each new sequence and to the columns of the longest."""
        height, width = self.table.shape
        fresh = sum(request.seq not in self._rows for request in requests)
        columns = max((request.blocks.size for request in requests), default=0)
        rows = len(self._rows) + fresh
        if rows <= height and columns <= width:
            return
        if columns > width:
            width = max(columns, 2 * width)
        if rows > height:
            height = max(rows, 2 * height)
        self._resize(height, width)

    def _resize(self, height: int, width: int) -> None:
        if (height, width) != tuple(self.table.shape):
            table = self.table.new_zeros(height, width)
            table[: self.table.shape[0], : self.table.shape[1]] = self.table
            self.table = table
        taken = set(self._rows.values())
        self._free = [row for row in range(height - 1, -1, -1) if row not in taken]
