"""Rows that visit the cache where it is: runs of consecutive blocks, read without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cplayers.cache.tables import Request
from cplayers.ops import Spans, Tile, tile_rows


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
    requests: Sequence[Request], spans: Spans, block_size: int, device: torch.device
) -> Iterator[Read]:
    """Reads of requests whose rows are all here, runs out of reach left out.

    Args:
        requests: In the order of their rows, ``new`` rows each.
        spans: What each row sees of its sequence's local shard, on the host.
        block_size: Tokens per block.
        device: Where lo and hi are wanted.
    """
    lo, hi = spans
    first, last = lo.tolist(), hi.tolist()
    row1 = 0
    for request in requests:
        row0, row1 = row1, row1 + request.new
        if row0 == row1:
            continue
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
