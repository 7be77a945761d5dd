"""What rows see: of keys that came to them, or of the cache where it is.

A kernel that looks up block tables needs `PagedKeys` and nothing else. Others are called once for
each `Read`: a run of consecutive blocks, in place, or short runs put together, which are copied.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cplayers.cache.tables import Request
from cplayers.cache.view import RankView
from cplayers.ops import PagedKeys, Spans, Tile, tile_rows

MIN_RUN = 256
"""Keys of a run from which it is read in place; copying fewer costs less than a call for them."""

MAX_COPIED = 4096
"""Most keys that are copied at once."""


@dataclass(frozen=True)
class Shard:
    """What each row sees of some keys: ``lo..hi`` of them, and their `tile_rows`."""

    lo: Tensor
    hi: Tensor
    tiles: tuple[Tile, ...]

    @classmethod
    def of(cls, spans: Spans, device: torch.device) -> Shard:
        """From spans on the host."""
        lo, hi = spans
        return cls(lo.to(device), hi.to(device), tile_rows(lo, hi))


@dataclass(frozen=True)
class Read:
    """Rows ``row0..row1`` against ``length`` keys of the cache.

    ``lo``, ``hi`` count from the first of them; ``tiles`` is their `tile_rows`.

    Attributes:
        slot: Slot of the first key, of consecutive ones.
        blocks: Blocks of the keys, int64 on the device, where they are not consecutive; their first
            slots are then ``blocks * block_size``, and ``slot`` is that of the first.
    """

    row0: int
    row1: int
    slot: int
    length: int
    lo: Tensor
    hi: Tensor
    tiles: tuple[Tile, ...]
    blocks: Tensor | None = None

    def slots(self, block_size: int) -> Tensor:
        """Slot of each key, int64 `[length]`.

        Args:
            block_size: Slots per block.
        """
        if self.blocks is None:
            return torch.arange(self.slot, self.slot + self.length)
        offsets = torch.arange(block_size, device=self.blocks.device)
        return (self.blocks[:, None] * block_size + offsets).flatten()[: self.length]


def build_reads(
    requests: Sequence[Request], positions: Tensor, view: RankView, window: int | None
) -> Iterator[Read]:
    """Reads of requests whose rows are all here, runs out of reach left out.

    Args:
        requests: In the order of their rows, ``new`` rows each.
        positions: Of the rows, on the host.
        view: This rank.
        window: Sliding window of the layer, or ``None``.
    """
    lo, hi = view.spans(positions, window)
    block_size, device = view.layout.block_size, view.device
    first, last = lo.tolist(), hi.tolist()
    row1 = 0
    for request in requests:
        row0, row1 = row1, row1 + request.new
        if row0 == row1:
            continue
        request.require_kept(window)
        held = last[row1 - 1]  # the last row sees every key of the shard
        for start, runs in _pieces(request, held, first[row0], block_size):
            start *= block_size
            length = min(sum(blocks for _, blocks in runs) * block_size, held - start)
            run_lo, run_hi = lo[row0:row1], hi[row0:row1]
            if start or length < held:
                run_lo = (run_lo - start).clamp(0, length)
                run_hi = (run_hi - start).clamp(0, length)
            tiles = tile_rows(run_lo, run_hi)
            if tiles:
                run_lo, run_hi = run_lo.to(device), run_hi.to(device)
                copied = None
                if len(runs) > 1:
                    ids = [block for run, blocks in runs for block in range(run, run + blocks)]
                    copied = torch.tensor(ids, device=device)
                slot = runs[0][0] * block_size
                yield Read(row0, row1, slot, length, run_lo, run_hi, tiles, copied)


def _pieces(
    request: Request, held: int, lo: int, block_size: int
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """The blocks of the keys ``lo..held - 1`` as runs, the short ones put together.

    Yields:
        Index of the first block, and the runs: (first id, number of blocks).
    """
    short: list[tuple[int, int]] = []
    start = begin = lo // block_size
    for run in request.blocks.runs(-(-held // block_size), start):
        is_short = run[1] * block_size < MIN_RUN
        if short and (not is_short or (start - begin + run[1]) * block_size > MAX_COPIED):
            yield begin, short
            short, begin = [], start
        if is_short:
            short.append(run)
        else:
            yield start, [run]
            begin = start + run[1]
        start += run[1]
    if short:
        yield begin, short


def paged_keys(
    requests: Sequence[Request],
    rows: Sequence[int],
    table: Tensor,
    positions: Tensor,
    view: RankView,
    window: int | None,
) -> PagedKeys:
    """The same as `build_reads` for kernels that look up block tables.

    Args:
        requests: In the order of their rows, ``new`` rows each.
        rows: Row of each in the table.
        table: `TableStore.table`.
        positions: Of the rows, on the host.
        view: This rank.
        window: Sliding window of the layer, or ``None``.
    """
    if window is not None or any(request.oldest for request in requests):
        for request in requests:
            request.require_kept(window)
    lo, hi = view.spans(positions, window)
    new = [request.new for request in requests]
    request_rows, usual = torch.tensor(rows), 1
    if any(count != 1 for count in new):
        usual = -(-len(positions) // max(1, sum(count > 0 for count in new)))
        request_rows = request_rows.repeat_interleave(torch.tensor(new))
    at, device = request_rows.to(view.device), view.device
    most = max(new, default=0)
    causal = window is None and (most <= 1 or view.layout.cp_size == 1)
    return PagedKeys(
        table,
        view.layout.block_size,
        at,
        lo.to(device),
        hi.to(device),
        most,
        tuple(new) if causal else None,
        usual,
    )
