"""The block tables of all sequences as one tensor, which kernels look up.

    table   int32 [S, B] on the device: row s has the block ids of one sequence, in order

Only what a step changes is written: the ends of tables that it adds to or replaces, and of those a
step before it wrote without ever being committed. Whatever lies before the first block that was not
full before the step is as it was. Entries beyond a sequence's blocks hold anything; no span
reaches them. The tensor is one buffer, renewed only to grow, so that a captured graph finds it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from cplayers.cache.tables import Request, TableView


class TableStore:
    """Block tables on a device.

    Args:
        device: Where kernels read them.

    Attributes:
        table: The tensor, with at least one row and one column.
        host: The same on the host; the same tensor where that is the device.
    """

    def __init__(self, device: torch.device) -> None:
        with torch.inference_mode(False):  # so that both later modes may write in place
            self.table = torch.zeros(1, 1, dtype=torch.int32, device=device)
            self.host = self.table.cpu()
        self._rows: dict[Hashable, int] = {}
        self._free = [0]
        self._unsettled: set[Hashable] = set()
        self._loaded: list[Hashable] = []

    def load(self, requests: Sequence[Request]) -> list[int]:
        """Write what a step changes, and return the row of each request's sequence.

        Args:
            requests: With the blocks that they have in the step.
        """
        known, unsettled = self._rows, self._unsettled
        rows: list[int] = []
        changed: list[tuple[int, int, TableView]] = []  # row, first column, blocks
        self._loaded = []
        for request in requests:
            seq, blocks = request.seq, request.blocks
            row, first = known.get(seq), request.first_open
            if row is None:
                row, first = known.setdefault(seq, self._new_row()), 0
            elif not blocks.tail and seq not in unsettled:
                rows.append(row)
                continue
            rows.append(row)
            unsettled.add(seq)
            self._loaded.append(seq)
            changed.append((row, first, blocks))
        if changed:
            try:
                self._write(changed)
            except BaseException:  # what was not written whole begins anew
                for seq in self._loaded:
                    self.drop(seq)
                raise
        return rows

    def settle(self) -> None:
        """The step loaded last was committed: what it wrote is what its sequences have."""
        self._unsettled.difference_update(self._loaded)

    def reserve(self, sequences: int, blocks: int) -> None:
        """Grow to so many rows and columns at once, so that the tensor stays where it is."""
        height, width = self.table.shape
        self._resize(max(height, sequences), max(width, blocks))

    def drop(self, seq: Hashable) -> None:
        """Forget a sequence; one of the same name begins anew."""
        self._unsettled.discard(seq)
        row = self._rows.pop(seq, None)
        if row is not None:
            self._free.append(row)

    def _new_row(self) -> int:
        height, width = self.table.shape
        if not self._free:
            self._resize(2 * height, width)
        return self._free.pop()

    def _write(self, changed: list[tuple[int, int, TableView]]) -> None:
        height, width = self.table.shape
        columns = max(blocks.size for _, _, blocks in changed)
        if columns > width:
            width = max(columns, 2 * width)
            self._resize(height, width)
        ids: list[int] = []
        at: list[int] = []  # row and column of each, as one index: they are few
        for row, first, blocks in changed:
            if first < blocks.size:
                ids += blocks.since(first)
                at += range(row * width + first, row * width + blocks.size)
        values, index = torch.tensor(ids, dtype=torch.int32), torch.tensor(at, dtype=torch.long)
        self.host.view(-1)[index] = values
        if self.table is not self.host:
            self.table.view(-1)[index.to(self.table.device)] = values.to(self.table.device)

    def _resize(self, height: int, width: int) -> None:
        if (height, width) != tuple(self.table.shape):
            with torch.inference_mode(False):
                table = self.host.new_zeros(height, width)
                table[: self.host.shape[0], : self.host.shape[1]] = self.host
                self.host, self.table = table, table.to(self.table.device)
        taken = set(self._rows.values())
        self._free = [row for row in range(height - 1, -1, -1) if row not in taken]
