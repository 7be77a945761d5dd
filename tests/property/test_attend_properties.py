"""Tiles cover exactly what the spans say, and every backend equals fp64 attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cplayers.ops import attend, attention_reference, spans, tile_rows
from cplayers.ops.backends import BACKENDS

SEEDS = st.integers(0, 2**20)


def draw_spans(rows: int, keys: int, shape: str, seed: int) -> tuple[Tensor, Tensor]:
    """Spans of one of the shapes that occur, or any spans at all."""
    generator = torch.Generator().manual_seed(seed)

    def number(stop: int) -> int:
        return int(torch.randint(0, stop + 1, (), generator=generator))

    steps = torch.arange(rows)
    if shape == "any":
        return (
            torch.randint(0, keys + 1, (rows,), generator=generator),
            torch.randint(0, keys + 1, (rows,), generator=generator),
        )
    if shape == "causal":
        hi = (number(keys) + steps).clamp(max=keys)
        return torch.zeros_like(hi), hi
    if shape == "packed":
        start = torch.randint(0, 2, (rows,), generator=generator).mul(steps)
        start = start.cummax(0).values.clamp(max=keys)
        return start, (steps + 1).clamp(max=keys)
    size, interleave = 1 + number(3), 1 + number(4)
    span = size * interleave
    window = 1 + number(keys) if shape == "window" else None

    def count_before(n: Tensor) -> Tensor:
        return ((n // span) * interleave + (n % span).clamp(max=interleave)).clamp(max=keys)

    return spans(steps + number(keys), count_before, window)


SHAPES = st.sampled_from(["any", "causal", "packed", "interleaved", "window"])


@settings(deadline=None)
@given(
    rows=st.integers(0, 40),
    keys=st.integers(0, 300),
    shape=SHAPES,
    max_rows=st.integers(1, 16),
    seed=SEEDS,
)
@example(rows=13, keys=3, shape="interleaved", max_rows=4, seed=1)
def test_tiles_say_what_the_spans_say(
    rows: int, keys: int, shape: str, max_rows: int, seed: int
) -> None:
    lo, hi = draw_spans(rows, keys, shape, seed)
    covered: list[int] = []
    for tile in tile_rows(lo, hi, max_rows):
        assert all(type(x) is int for x in tile[:4])
        inside = list(range(tile.row0, tile.row1))
        covered += inside
        los, his = lo[inside].tolist(), hi[inside].tolist()
        prefix = tile.hi - tile.lo - len(inside)
        if tile.kind == "full":
            assert set(zip(los, his, strict=True)) == {(tile.lo, tile.hi)}
        elif tile.kind == "causal":
            assert prefix >= 0
            assert his == [tile.lo + prefix + i + 1 for i in range(len(inside))]
            assert set(los) == {tile.lo}
        else:
            assert tile.kind == "masked"
            assert len(inside) <= max_rows
            assert (tile.lo, tile.hi) == (min(los), max(his))
            seen = {key for a, b in zip(los, his, strict=True) for key in range(a, b)}
            assert seen == set(range(tile.lo, tile.hi))
    assert covered == (hi > lo).nonzero().flatten().tolist()


@pytest.mark.parametrize("backend", sorted(BACKENDS))
@settings(deadline=None)
@given(
    rows=st.integers(0, 12),
    keys=st.integers(0, 200),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    dim=st.sampled_from([1, 2, 7, 16]),
    shape=SHAPES,
    seed=SEEDS,
)
def test_equals_attention_in_fp64(
    backend: str,
    rows: int,
    keys: int,
    kv_heads: int,
    group: int,
    dim: int,
    shape: str,
    seed: int,
) -> None:
    lo, hi = draw_spans(rows, keys, shape, seed)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(rows, kv_heads * group, dim, generator=generator) * 4
    k = torch.randn(kv_heads, keys, dim, generator=generator).transpose(0, 1)
    v = torch.randn(kv_heads, keys, dim, generator=generator).transpose(0, 1)
    out, lse = attend(q, k, v, lo, hi, scale=dim**-0.5, backend=backend)
    expected = attention_reference(q, k, v, lo, hi, scale=dim**-0.5)
    torch.testing.assert_close(out.double(), expected.out, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-6, atol=1e-5)
