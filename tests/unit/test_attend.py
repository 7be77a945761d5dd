"""`attend` and its backends against fp64 attention."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cplayers.errors import ConfigError
from cplayers.ops import (
    PagedKeys,
    Tile,
    attend,
    attend_paged,
    attention_reference,
    available_backends,
    select,
    tile_rows,
)
from cplayers.ops.backends import BACKENDS, rows_cpu

ALL = sorted(BACKENDS.keys() - {"triton", "varlen"})  # these need a CUDA device: tests/gpu


def tensors(
    rows: int, keys: int, heads: int = 4, kv_heads: int = 2, dim: int = 16, value_dim: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    """Peaked q, and k, v as views into head-major storage."""
    torch.manual_seed(rows + keys)
    k = torch.randn(kv_heads, keys, dim).transpose(0, 1)
    v = torch.randn(kv_heads, keys, value_dim).transpose(0, 1)
    return torch.randn(rows, heads, dim) * 4, k, v


def test_the_set_of_backends_is_known() -> None:
    assert ALL == ["cpu", "flash_cpu", "math", "native", "rows_cpu"]
    assert sorted(BACKENDS) == sorted([*ALL, "triton", "varlen"])


@pytest.mark.parametrize("backend", ALL)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("prefix", [0, 40, 1500])
def test_causal_chunk(backend: str, kv_heads: int, prefix: int) -> None:
    q, k, v = tensors(5, prefix + 5, heads=6, kv_heads=kv_heads)
    hi = torch.arange(prefix + 1, prefix + 6)
    lo = torch.zeros_like(hi)
    out, lse = attend(q, k, v, lo, hi, scale=0.25, backend=backend)
    expected = attention_reference(q, k, v, lo, hi, scale=0.25)
    torch.testing.assert_close(out.double(), expected.out, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("backend", ALL)
def test_masked_tile_with_a_long_common_middle(backend: str) -> None:
    """A window over a shard: rims on both sides of the keys that all rows see."""
    q, k, v = tensors(40, 500)
    lo = torch.arange(40) // 3
    hi = 400 + torch.arange(40) // 2
    assert [t.kind for t in tile_rows(lo, hi)] == ["masked"]
    out, lse = attend(q, k, v, lo, hi, scale=0.25, backend=backend)
    expected = attention_reference(q, k, v, lo, hi, scale=0.25)
    torch.testing.assert_close(out.double(), expected.out, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("backend", ALL)
def test_rows_that_see_nothing(backend: str) -> None:
    q, k, v = tensors(4, 9)
    lo, hi = torch.tensor([0, 3, 5, 0]), torch.tensor([0, 3, 2, 4])
    out, lse = attend(q, k, v, lo, hi, scale=1.0, backend=backend)
    assert not out[:3].any()
    assert lse[:3].eq(-math.inf).all()
    assert out[3].any()


@pytest.mark.parametrize("backend", [*ALL, "auto"])
@pytest.mark.parametrize(("rows", "keys"), [(0, 5), (3, 0), (0, 0)])
def test_no_rows_or_no_keys(backend: str, rows: int, keys: int) -> None:
    q, k, v = tensors(rows, keys)
    nothing = torch.zeros(rows, dtype=torch.int64)
    out, lse = attend(q, k, v, nothing, nothing, scale=1.0, backend=backend)
    assert out.shape == (rows, 4, 16)
    assert lse.shape == (rows, 4)
    assert not out.any()
    assert lse.eq(-math.inf).all()


@pytest.mark.parametrize("backend", ["math", "rows_cpu", "auto"])
def test_softcap_and_narrow_values(backend: str) -> None:
    q, k, v = tensors(6, 30, value_dim=5)
    hi = torch.arange(25, 31)
    lo = torch.tensor([0, 0, 3, 4, 5, 6])
    arguments = {"scale": 0.5, "softcap": 3.0}
    out, lse = attend(q, k, v, lo, hi, backend=backend, **arguments)
    expected = attention_reference(q, k, v, lo, hi, **arguments)
    torch.testing.assert_close(out.double(), expected.out, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-6, atol=1e-5)
    uncapped = attention_reference(q, k, v, lo, hi, scale=0.5)
    assert (uncapped.out - expected.out).abs().max() > 0.1


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8])
def test_few_rows_over_many_keys(group: int) -> None:
    """The path of "cpu" that reads keys which do not fit the cache."""
    keys = rows_cpu.MIN_BYTES // (64 * 4)
    q, k, v = tensors(1, keys, heads=group, kv_heads=1, dim=64, value_dim=64)
    assert rows_cpu.pays(q, k.transpose(0, 1))
    apart = torch.empty(keys, 2, 64)[:, :1]  # slow on the left of a product
    assert not rows_cpu.pays(q, apart.transpose(0, 1))
    assert select(q, k, v) == "cpu"
    lo, hi = torch.tensor([0]), torch.tensor([keys])
    out, lse = attend(q, k, v, lo, hi, scale=0.125)
    expected = attention_reference(q, k, v, lo, hi, scale=0.125)
    torch.testing.assert_close(out.double(), expected.out, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected.lse, rtol=1e-6, atol=1e-5)


def test_math_in_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = tensors(23, 23)
    hi = torch.arange(1, 24)
    lo = torch.zeros_like(hi)
    monkeypatch.setattr("cplayers.ops.backends.math.MAX_SCORES", 23 * 4 * 5)
    out, _ = attend(q, k, v, lo, hi, scale=0.25, backend="math")
    expected = attention_reference(q, k, v, lo, hi, scale=0.25)
    torch.testing.assert_close(out.double(), expected.out, rtol=0, atol=1e-5)


def test_given_tiles_are_used() -> None:
    q, k, v = tensors(3, 8)
    lo, hi = torch.zeros(3, dtype=torch.int64), torch.tensor([6, 7, 8])
    expected = attend(q, k, v, lo, hi, scale=0.3)
    given = attend(q, k, v, lo, hi, scale=0.3, tiles=tile_rows(lo, hi))
    assert torch.equal(given.out, expected.out)
    only_first = attend(q, k, v, lo, hi, scale=0.3, tiles=(Tile(0, 1, 0, 6, "full"),))
    torch.testing.assert_close(only_first.out[0], expected.out[0])
    assert not only_first.out[1:].any()


def test_math_has_gradients() -> None:
    q = torch.randn(4, 2, 3, dtype=torch.float64, requires_grad=True)
    k = torch.randn(6, 1, 3, dtype=torch.float64, requires_grad=True)
    v = torch.randn(6, 1, 2, dtype=torch.float64, requires_grad=True)
    lo, hi = torch.tensor([0, 0, 1, 5]), torch.tensor([3, 4, 5, 5])

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, lo, hi, scale=0.5, backend="math", softcap=5.0).out

    assert torch.autograd.gradcheck(run, (q, k, v))


@pytest.mark.parametrize(
    ("change", "chosen"),
    [
        ({}, "cpu"),
        ({"softcap": 2.0}, "math"),
        ({"value_dim": 5}, "cpu"),
        ({"value_dim": 5, "dtype": torch.bfloat16}, "flash_cpu"),
        ({"value_dim": 17}, "math"),
        ({"dtype": torch.bfloat16}, "flash_cpu"),
    ],
)
def test_select_tells_what_auto_takes(change: dict[str, object], chosen: str) -> None:
    q, k, v = tensors(1, 5, value_dim=int(change.get("value_dim", 16)))
    q, k, v = (t.to(change.get("dtype", torch.float32)) for t in (q, k, v))
    softcap = change.get("softcap")
    assert select(q, k, v, softcap) == chosen
    assert {chosen, "math"} <= set(available_backends(q, k, v, softcap))


def test_strided_vectors_are_not_given_to_flash() -> None:
    q, k, v = tensors(1, 5)
    k = k.transpose(1, 2).contiguous().transpose(1, 2)
    assert select(q, k, v) == "math"
    lo, hi = torch.tensor([0]), torch.tensor([5])
    expected = attention_reference(q, k, v, lo, hi, scale=0.25)
    out, _ = attend(q, k, v, lo, hi, scale=0.25)
    torch.testing.assert_close(out.double(), expected.out, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "softcap", "value_dim", "message"),
    [
        ("flash_cpu", 2.0, 16, r"flash_cpu.*no softcap, 2\.0.*math"),
        ("cpu", None, 17, r"cpu.*V=17, H=16.*use auto or one of rows_cpu, math"),
        ("cudnn", None, 16, "cudnn.*no such backend.*cpu, flash_cpu, rows_cpu, math"),
    ],
)
def test_a_named_backend_is_never_replaced(
    backend: str, softcap: float | None, value_dim: int, message: str
) -> None:
    q, k, v = tensors(1, 5, value_dim=value_dim)
    span = torch.tensor([0]), torch.tensor([5])
    with pytest.raises(ConfigError, match=message):
        attend(q, k, v, *span, scale=1.0, softcap=softcap, backend=backend)


def test_rows_cpu_refuses_coarse_scores() -> None:
    q, k, v = (t.bfloat16() for t in tensors(1, 5))
    with pytest.raises(ConfigError, match="bfloat16 is too coarse"):
        attend(q, k, v, torch.tensor([0]), torch.tensor([5]), scale=1.0, backend="rows_cpu")


def test_wrong_arguments_are_named() -> None:
    q, k, v = tensors(2, 5)
    lo, hi = torch.tensor([0, 0]), torch.tensor([5, 5])
    with pytest.raises(ConfigError, match=r"k \[5, 2, 16\].*K dividing N"):
        attend(q[:, :3], k, v, lo, hi, scale=1.0)
    with pytest.raises(ConfigError, match=r"hi \[1\]"):
        attend(q, k, v, lo, hi[:1], scale=1.0)
    with pytest.raises(ConfigError, match=r"torch\.float64.*one dtype"):
        attend(q, k.double(), v, lo, hi, scale=1.0)
    with pytest.raises(ConfigError, match=r"lo=0, hi=6 in row 1: .*within the 5 keys"):
        attend(q, k, v, lo, hi + torch.tensor([0, 1]), scale=1.0)
    with pytest.raises(ConfigError, match=r"lo=-1, hi=5 in row 0"):
        attend(q, k, v, lo - 1, hi, scale=1.0)


def test_a_query_that_is_not_a_number_spoils_no_other() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 2, 16), torch.randn(40, 1, 16), torch.randn(40, 1, 16)
    spans = torch.tensor([0, 0]), torch.tensor([39, 40])
    expected = attention_reference(q, k, v, *spans, scale=0.25)
    q[1, 1] = torch.nan
    for backend in ALL:
        out, lse = attend(q, k, v, *spans, scale=0.25, backend=backend)
        if backend == "native":  # others merge parts of it, which makes it nothing seen
            assert bool(out[1, 1].isnan().all())
        out[1, 1], lse[1, 1] = expected.out[1, 1].float(), expected.lse[1, 1].float()
        torch.testing.assert_close(out.double(), expected.out, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse.double(), expected.lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("shift", [-1e35, -1e4, 0.0, 1e4, 1e35])
def test_native_takes_scores_of_any_size(shift: float) -> None:
    k = torch.ones(70, 1, 16)
    k[:, 0, 0] = shift
    v, q = torch.randn(70, 1, 16), torch.zeros(1, 1, 16)
    q[..., 0] = 1
    spans = torch.tensor([3]), torch.tensor([70])
    out, lse = attend(q, k, v, *spans, scale=1.0, backend="native")
    torch.testing.assert_close(out[0, 0], v[3:, 0].mean(0), rtol=0, atol=1e-5)
    assert float(lse) == pytest.approx(shift + math.log(67), rel=1e-6)


def test_paged_attention_takes_what_fits_together_alone() -> None:
    q, cache = torch.randn(2, 4, 16), torch.randn(2, 8, 16)
    at = torch.zeros(2, dtype=torch.long)
    keys = PagedKeys(torch.zeros(1, 1, dtype=torch.int32), 8, at, at, at + 1, 1)
    assert attend_paged(q, cache, cache, keys, scale=1.0) is not None
    wrong = [
        (q.bfloat16(), cache, keys),
        (q, cache.bfloat16(), keys),
        (q[:, :3], cache, keys),
        (q, cache[:0], keys),
        (q, cache, keys._replace(lo=at[:1])),
        (q, cache, keys._replace(hi=at.int())),
        (q, cache, keys._replace(block_table=keys.block_table.long())),
    ]
    for queries, stored, seen in wrong:
        with pytest.raises(ConfigError, match="int64 request, lo and hi"):
            attend_paged(queries, stored, stored, seen, scale=1.0)
