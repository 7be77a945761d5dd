"""What rows see: of keys that came to them, or of the cache where it is, read without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cplayers.cache.tables import Request
from cplayers.cache.view import RankView
from cplayers.ops import Spans, Tile, tile_rows


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
    """Rows ``row0..row1`` against one run of the cache, ``length`` keys from ``slot`` on.

    ``lo``, ``hi`` count from the run's first key; ``tiles`` is their `tile_rows`.
    """

    row0: int
    row1: int
    slot: int
    length: int
    lo: Tensor
    hi: Tensor
    tiles: tuple[Tile, ...]


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
        start = 0
        for block, blocks in request.blocks.runs(-(-held // block_size)):
            length = min(blocks * block_size, held - start)
            if first[row0] < start + length:
                run_lo, run_hi = lo[row0:row1], hi[row0:row1]
                if length < held:
                    run_lo = (run_lo - start).clamp(0, length)
                    run_hi = (run_hi - start).clamp(0, length)
                tiles = tile_rows(run_lo, run_hi)
                if tiles:
                    run_lo, run_hi = run_lo.to(device), run_hi.to(device)
                    yield Read(row0, row1, block * block_size, length, run_lo, run_hi, tiles)
            start += length
