"""`spans` and `tile_rows` by hand-counted examples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from cplayers.ops import Tile, spans, tile_rows


def interleaved(rank: int, size: int, interleave: int):
    """count_before of one rank, counted one position after the other."""

    def count(n: Tensor) -> Tensor:
        return torch.tensor(
            [sum((p // interleave) % size == rank for p in range(m)) for m in n.tolist()]
        )

    return count


def of(pairs: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    lo, hi = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).unbind(1)
    return lo, hi


@pytest.mark.parametrize(("rank", "expected"), [(0, [2, 2, 3, 3]), (1, [1, 2, 2, 3])])
def test_several_new_tokens_over_a_sharded_cache(rank: int, expected: list[int]) -> None:
    lo, hi = spans(torch.arange(2, 6), interleaved(rank, 2, 1))
    assert (lo.tolist(), hi.tolist()) == ([0] * 4, expected)
    assert lo.dtype == hi.dtype == torch.int64


def test_window_is_in_global_positions() -> None:
    # Positions 12..15 lie on rank 3 alone: the others are out of reach of the last query.
    for rank in range(4):
        lo, hi = spans(torch.tensor([15]), interleaved(rank, 4, 4), window=4)
        assert (hi - lo).tolist() == [4 if rank == 3 else 0]


def test_window_longer_than_the_sequence_sees_all() -> None:
    lo, hi = spans(torch.arange(5), lambda n: n, window=100)
    assert (lo.tolist(), hi.tolist()) == ([0] * 5, [1, 2, 3, 4, 5])


def test_spans_take_queries_in_any_order() -> None:
    _, hi = spans(torch.tensor([5, 0, 3]), interleaved(0, 2, 2))
    assert hi.tolist() == [4, 1, 2]


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([], ()),
        ([(0, 0), (3, 2)], ()),
        ([(2, 9)], (Tile(0, 1, 2, 9, "full"),)),
        ([(0, 7)] * 5, (Tile(0, 5, 0, 7, "full"),)),
        ([(0, 1), (0, 2), (0, 3)], (Tile(0, 3, 0, 3, "causal"),)),
        ([(4, 9), (4, 10)], (Tile(0, 2, 4, 10, "causal"),)),
        ([(0, 0), (0, 1), (0, 2)], (Tile(1, 3, 0, 2, "causal"),)),
        ([(0, 2), (0, 0), (0, 2)], (Tile(0, 1, 0, 2, "full"), Tile(2, 3, 0, 2, "full"))),
        ([(0, 5), (1, 6), (2, 7)], (Tile(0, 3, 0, 7, "masked"),)),
        # Interleaved: short runs are cheaper under one mask than apart.
        ([(0, 1), (0, 2), (0, 2), (0, 3)], (Tile(0, 4, 0, 3, "masked"),)),
    ],
)
def test_kinds(pairs: list[tuple[int, int]], expected: tuple[Tile, ...]) -> None:
    assert tile_rows(*of(pairs)) == expected


def test_packed_requests_are_one_tile_each() -> None:
    starts, lengths = [0, 5, 12, 13], [5, 7, 1, 300]
    pairs = [(s, s + i + 1) for s, n in zip(starts, lengths, strict=True) for i in range(n)]
    kinds = ["causal", "causal", "full", "causal"]
    rows = [0, 5, 12, 13, 313]
    assert tile_rows(*of(pairs)) == tuple(
        Tile(a, b, s, s + n, kind)
        for a, b, s, n, kind in zip(rows[:-1], rows[1:], starts, lengths, kinds, strict=True)
    )


def test_decode_batch_is_one_tile_each() -> None:
    tiles = tile_rows(*of([(0, 9), (9, 30), (30, 31)]))
    assert [(t.lo, t.hi, t.kind) for t in tiles] == [
        (0, 9, "full"),
        (9, 30, "full"),
        (30, 31, "full"),
    ]


def test_long_causal_run_is_one_tile() -> None:
    hi = torch.arange(4096) + 1
    assert tile_rows(torch.zeros_like(hi), hi) == (Tile(0, 4096, 0, 4096, "causal"),)


@pytest.mark.parametrize("interleave", [1, 3, 16])
def test_interleaved_chunk_takes_few_tiles(interleave: int) -> None:
    hi = torch.arange(1000, 2024)
    hi = (hi // (2 * interleave)) * interleave + (hi % (2 * interleave)).clamp(max=interleave)
    tiles = tile_rows(torch.zeros_like(hi), hi)
    assert len(tiles) <= 8
    assert all(tile.row1 - tile.row0 <= 256 for tile in tiles)
