"""The algebra of `merge`: any order, any nesting, an identity, equal to attention over all keys."""

from __future__ import annotations

import math

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cplayers.ops import Partial, attention_reference, empty, merge, merge_stacked

SIZES = st.integers(1, 5)


def partials(n: int, rows: int, heads: int, seed: int) -> list[Partial]:
    """Random partials of very unequal mass; a third of the rows saw nothing, or hold worse."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(n, rows, heads, 3, generator=generator)
    lse = torch.randn(n, rows, heads, generator=generator) * 20
    fate = torch.randint(0, 9, lse.shape, generator=generator)
    for number, foreign in enumerate([-math.inf, math.inf, math.nan]):
        lse[fate == number] = foreign
        out[fate == number] = math.nan
    return [Partial(o, x) for o, x in zip(out, lse, strict=True)]


def assert_same(a: Partial, b: Partial) -> None:
    torch.testing.assert_close(a.out, b.out, rtol=0, atol=2e-6)
    torch.testing.assert_close(a.lse, b.lse, rtol=1e-6, atol=1e-6)


@settings(deadline=None)
@given(n=SIZES, rows=SIZES, heads=SIZES, seed=st.integers(0, 2**20))
def test_order_nesting_and_identity_do_not_matter(n: int, rows: int, heads: int, seed: int) -> None:
    parts = partials(n, rows, heads, seed)
    whole = merge(parts)
    assert whole.out.isfinite().all()
    assert not whole.lse.isnan().any()
    assert_same(merge(parts[::-1]), whole)
    assert_same(merge_stacked(*(torch.stack(t) for t in zip(*parts, strict=True))), whole)
    nested = parts[0]
    for part in parts[1:]:
        nested = merge([nested, part])
    assert_same(merge([nested]), whole)
    assert_same(merge([*parts, empty(rows, heads, 3, torch.float32, "cpu")]), whole)


@settings(deadline=None)
@given(
    n=st.integers(1, 9),
    keys=st.integers(0, 20),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    seed=st.integers(0, 2**20),
)
@example(n=9, keys=1, kv_heads=1, group=1, seed=0)
def test_merge_over_shards_is_attention_over_all(
    n: int, keys: int, kv_heads: int, group: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(2, kv_heads * group, 4, generator=generator, dtype=torch.float64) * 4
    k = torch.randn(keys, kv_heads, 4, generator=generator, dtype=torch.float64)
    v = torch.randn(keys, kv_heads, 3, generator=generator, dtype=torch.float64)
    owner = torch.randint(0, n, (keys,), generator=generator) ** 2 // n  # unequal shards
    parts = []
    for rank in range(n):
        mine = owner == rank
        lo = torch.zeros(2, dtype=torch.int64)
        hi = torch.tensor([int(mine.sum()), int(mine[: keys // 2].sum())])
        parts.append(attention_reference(q, k[mine], v[mine], lo, hi, scale=1.0))
    hi = torch.tensor([keys, keys // 2])
    whole = attention_reference(q, k, v, torch.zeros_like(hi), hi, scale=1.0)
    merged = merge(parts)
    torch.testing.assert_close(merged.out, whole.out, rtol=0, atol=1e-12)
    torch.testing.assert_close(merged.lse, whole.lse.float(), rtol=1e-6, atol=1e-6)
