"""Tiles cover exactly what the spans say, and every backend equals fp64 attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from cplayers.ops import (
    PagedKeys,
    attend,
    attend_paged,
    attention_reference,
    spans,
    tile_rows,
)
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


@pytest.mark.parametrize("backend", sorted(BACKENDS.keys() - {"native", "triton", "varlen"}))
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


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int]:
    """Requests of (keys, rows), and a block size that need not divide anything."""
    few = st.lists(st.tuples(st.integers(0, 150), st.integers(1, 5)), min_size=1, max_size=4)
    return draw(few), draw(st.integers(1, 20))


@settings(deadline=None)
@given(
    given=requests(),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    dims=st.sampled_from([(16, 16), (48, 16), (80, 80), (128, 96), (576, 512)]),
    shape=SHAPES,
    threads=st.integers(1, 2),
    latent=st.booleans(),
    narrow=st.booleans(),
    seed=SEEDS,
)
@example(([(1100, 1), (700, 2)], 16), 1, 4, (128, 128), "causal", 2, False, False, 3)
@example(([(1100, 3)], 7), 1, 5, (64, 64), "window", 2, False, True, 4)
def test_native_attention_over_shuffled_blocks_equals_fp64(
    given: tuple[list[tuple[int, int]], int],
    kv_heads: int,
    group: int,
    dims: tuple[int, int],
    shape: str,
    threads: int,
    latent: bool,
    narrow: bool,
    seed: int,
) -> None:
    """Blocks in any order, the others hold NaN; a value may be a part of its key."""
    (lengths, size), (head_dim, value_dim) = given, dims
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.bfloat16 if narrow else torch.float32
    blocks = [-(-keys // size) for keys, _ in lengths]
    order = torch.randperm(2 * sum(blocks) + 1, generator=generator).int()
    slots = len(order) * size
    k_cache = torch.full((kv_heads, slots, head_dim), torch.nan, dtype=dtype)
    v_cache = k_cache[..., :value_dim]
    if not latent:
        v_cache = torch.full((kv_heads, slots, value_dim), torch.nan, dtype=dtype)
    table = torch.full((len(lengths) + 1, max(blocks) + 1), 2**30, dtype=torch.int32)
    q = torch.randn(sum(r for _, r in lengths), kv_heads * group, head_dim, generator=generator)
    q = (q * 4).to(dtype)
    los, his, rows, expected = [], [], [], []
    for i, (keys, count) in enumerate(lengths):
        lo, hi = draw_spans(count, keys, shape, seed + i)
        ids = order[sum(blocks[:i]) :][: blocks[i]]
        table[i + 1, : blocks[i]] = ids
        at = (ids.long()[:, None] * size + torch.arange(size)).flatten()[:keys]
        seen = torch.zeros(keys, dtype=torch.bool)
        for a, b in zip(lo.tolist(), hi.tolist(), strict=True):
            seen[a:b] = True
        for plane in (k_cache, v_cache) if not latent else (k_cache,):
            drawn = torch.randn(kv_heads, keys, plane.shape[2], generator=generator)
            plane[:, at] = torch.where(seen[:, None], drawn, torch.nan).to(dtype)
        own = q[len(torch.cat([*rows, lo[:0]])) :][:count]
        keys_of, values_of = (p[:, at].transpose(0, 1).nan_to_num() for p in (k_cache, v_cache))
        scale = head_dim**-0.5
        expected.append(attention_reference(own, keys_of, values_of, lo, hi, scale=scale))
        los.append(lo)
        his.append(hi)
        rows.append(torch.full_like(lo, i + 1))
    keys = PagedKeys(table, size, torch.cat(rows), torch.cat(los), torch.cat(his), 5)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = attend_paged(q, k_cache, v_cache, keys, scale=head_dim**-0.5, backend="native")
    finally:
        torch.set_num_threads(before)
    assert found is not None
    out, lse = (torch.cat(parts) for parts in zip(*expected, strict=True))
    # A weight is rounded nowhere; what is returned in bf16 is, once.
    rounding = out.abs().max() * 2**-8 if narrow else 0.0
    assert bool(((found.out.double() - out).abs() <= 1e-5 + rounding).all())
    torch.testing.assert_close(found.lse.double(), lse, rtol=1e-6, atol=1e-5)
