"""What the collectives of a mesh have sent, so that tests and benchmarks can assert the volume.

Bytes are those that one rank sends with the standard algorithms on n ranks::

    all_gather                  (n - 1) * nbytes(x)
    all_to_all, reduce_scatter  (n - 1) / n * nbytes(x)
    all_reduce                  2 * (n - 1) / n * nbytes(x), rounded up
    shift                       nbytes(x)

Collectives over a size-1 axis send nothing and are not recorded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

KEPT_RECORDS = 10_000


class TrafficRecord(NamedTuple):
    """One collective: over which axis, which operation, and the bytes that this rank sent."""

    axis: str
    operation: str
    bytes: int


def sent_bytes(operation: str, nbytes: int, n: int) -> int:
    """Bytes that one of ``n`` ranks sends for ``operation`` on a tensor of ``nbytes``."""
    if operation == "all_gather":
        return (n - 1) * nbytes
    if operation == "shift":
        return nbytes
    if operation == "all_reduce":
        return -(-2 * (n - 1) * nbytes // n)
    return (n - 1) * nbytes // n


class TrafficLog:
    """The last ``KEPT_RECORDS`` records as a sequence, and exact totals over all of them.

    ``len``, iteration and indexing see the kept records; ``totals``, ``bytes`` and ``count`` see
    everything since the log was made or cleared.
    """

    def __init__(self) -> None:
        self._records: deque[TrafficRecord] = deque(maxlen=KEPT_RECORDS)
        self._totals: dict[tuple[str, str], tuple[int, int]] = {}
        self._captures: list[TrafficLog] = []

    def record(self, axis: str, operation: str, sent: int) -> None:
        """Add one collective."""
        self._records.append(TrafficRecord(axis, operation, sent))
        count, total = self._totals.get((axis, operation), (0, 0))
        self._totals[axis, operation] = (count + 1, total + sent)
        for log in self._captures:
            log.record(axis, operation, sent)

    def totals(self) -> dict[tuple[str, str], tuple[int, int]]:
        """``(axis, operation) -> (count, bytes)``."""
        return dict(self._totals)

    def bytes(self, axis: str | None = None) -> int:
        """Bytes sent over ``axis``, or over all axes."""
        return sum(sent for key, (_, sent) in self._totals.items() if axis in (None, key[0]))

    def count(self, axis: str | None = None) -> int:
        """Collectives over ``axis``, or over all axes."""
        return sum(count for key, (count, _) in self._totals.items() if axis in (None, key[0]))

    def clear(self) -> None:
        """Forget all records and totals."""
        self._records.clear()
        self._totals.clear()

    @contextmanager
    def capture(self) -> Iterator[TrafficLog]:
        """A log of only what happens inside the ``with`` block. This log records it as well."""
        log = TrafficLog()
        self._captures.append(log)
        try:
            yield log
        finally:
            # By identity: two logs with equal records are still two logs.
            self._captures = [other for other in self._captures if other is not log]

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[TrafficRecord]:
        return iter(self._records)

    def __getitem__(self, index: int) -> TrafficRecord:
        return self._records[index]

    def __repr__(self) -> str:
        lines = [
            f"  {axis:7} {operation:15} {count:7} calls {sent:12} bytes"
            for (axis, operation), (count, sent) in sorted(self._totals.items())
        ]
        return "\n".join(["TrafficLog(", *lines, ")"]) if lines else "TrafficLog()"
