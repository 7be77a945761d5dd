"""Backend "math": narrow dtypes in chunks of keys, and few fp32 rows over many keys."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from cplayers.errors import ConfigError
from cplayers.ops import attend, available_backends, select
from cplayers.ops.backends import math as backend
from cplayers.testing.conformance import check_backend

NARROW = [torch.bfloat16, torch.float16]
run = partial(attend, backend="math")


class Recorder(TorchFunctionMode):
    """Notes which functions run, on what shapes, and the largest tensor that one makes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, list[tuple[int, ...]]]] = []
        self.largest = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [a for a in args if isinstance(a, Tensor)]
        self.calls.append((func.__name__, [tuple(a.shape) for a in given]))
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            memory = out.untyped_storage()
            if all(a.untyped_storage().data_ptr() != memory.data_ptr() for a in given):
                self.largest = max(self.largest, memory.nbytes())
        return out

    def shapes(self, name: str) -> list[list[tuple[int, ...]]]:
        """Shapes of the tensors given to each call of a function."""
        return [shapes for called, shapes in self.calls if called == name]


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Sets the keys of a chunk and the scores that are held."""

    def set_sizes(keys: int, scores: int) -> None:
        monkeypatch.setattr(backend, "CHUNK", 1)
        monkeypatch.setattr(backend, "ALIGN", 1)
        monkeypatch.setattr(backend, "MIN_KEYS", keys)
        monkeypatch.setattr(backend, "CHUNK_SCORES", scores)

    return set_sizes


def tensors(
    rows: int,
    keys: int,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    value_dim: int = 16,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, Tensor, Tensor]:
    """Peaked q, and k, v as views into head-major storage."""
    generator = torch.Generator().manual_seed(rows + keys)
    k = torch.randn(kv_heads, keys, dim, generator=generator).to(dtype).transpose(0, 1)
    v = torch.randn(kv_heads, keys, value_dim, generator=generator).to(dtype).transpose(0, 1)
    return (torch.randn(rows, heads, dim, generator=generator) * 4).to(dtype), k, v


def latents(
    rows: int, keys: int, heads: int = 4, dim: int = 24, value_dim: int = 16
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, _ = tensors(rows, keys, heads, 1, dim)
    return q, k, k[..., :value_dim]


def plain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lo: Tensor,
    hi: Tensor,
    dtype: torch.dtype,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over all keys at once in ``dtype``: out, rounded to q's unless fp64, and lse."""
    group = q.shape[1] // k.shape[1]
    wide_q, wide_k, wide_v = (t.to(dtype) for t in (q, k, v))
    scores = torch.einsum("tnh,snh->nts", wide_q, wide_k.repeat_interleave(group, 1)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    keys = torch.arange(len(k))
    hidden = (keys < lo[:, None]) | (keys >= hi[:, None])
    scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0.0)
    out = torch.einsum("nts,snv->tnv", weights, wide_v.repeat_interleave(group, 1))
    return out if dtype == torch.float64 else out.to(q.dtype), scores.logsumexp(-1).T


def check(
    q: Tensor, k: Tensor, v: Tensor, lo: Tensor, hi: Tensor, softcap: float | None = None
) -> None:
    """At most twice the error of one softmax in fp32 over all keys."""
    scale = q.shape[-1] ** -0.5
    out, lse = run(q, k, v, lo, hi, scale=scale, softcap=softcap)
    exact, exact_lse = plain(q, k, v, lo, hi, torch.float64, scale, softcap)
    whole, _ = plain(q, k, v, lo, hi, torch.float32, scale, softcap)
    error = (out.double() - exact).abs().max()
    assert out.dtype == q.dtype
    assert lse.dtype == torch.float32
    assert 0 < error <= 2 * (whole.double() - exact).abs().max()
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)
    blind = hi <= lo
    assert not out[blind].any()
    assert lse[blind].eq(-math.inf).all()


@pytest.mark.parametrize("sizes", [(5, 1), (7, 100), (16, 2000), (64, 1 << 20)])
@pytest.mark.parametrize("dtype", NARROW)
def test_conforms_in_chunks(
    small_chunks: Callable[[int, int], None], sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    """Keys that no row sees hold NaN."""
    small_chunks(*sizes)
    check_backend(run, dtypes=[dtype], softcap=True, value_dim=True)


@pytest.mark.parametrize("scores", [1, 1 << 20])
@pytest.mark.parametrize("chunk", [3, 32, 100])
@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 1), (6, 2), (3, 3)])
def test_spans_of_every_kind(
    small_chunks: Callable[[int, int], None], chunk: int, scores: int, heads: int, kv_heads: int
) -> None:
    """What a row sees begins, ends and is missing anywhere in the chunks."""
    small_chunks(chunk, scores)
    rows, keys = 23, 101
    steps = torch.arange(rows)
    for value_dim in (9, 16):
        q, k, v = tensors(rows, keys, heads, kv_heads, value_dim=value_dim)
        spans = [
            (torch.zeros_like(steps), torch.full_like(steps, keys)),  # full
            (torch.zeros_like(steps), steps + 1),  # causal
            (torch.zeros_like(steps), steps + keys - rows + 1),  # causal after a prefix
            (steps * 4, steps * 4 + 6),  # window
            (steps % 5 * 17, steps % 7 * 16 + 3),  # any, some see nothing
        ]
        for lo, hi in spans:
            check(q, k, v, lo, hi)
        check(q, k, v, *spans[2], softcap=3.0)
        assert (spans[-1][1] <= spans[-1][0]).any()


def test_a_long_common_middle(small_chunks: Callable[[int, int], None]) -> None:
    """Rims and a middle, whose partials are merged in their turn."""
    small_chunks(32, 500)
    steps = torch.arange(40)
    check(*tensors(40, 500), steps // 3, 400 + steps // 2)


@pytest.mark.parametrize("dtype", NARROW)
def test_latents_of_real_width(dtype: torch.dtype) -> None:
    """Three chunks of the real size, the last one short."""
    q, k, _ = tensors(1, 4001, 16, 1, 576, dtype=dtype)
    assert backend.CHUNK // 576 < 2000
    check(q / 4, k, k[..., :512], torch.tensor([0]), torch.tensor([4001]))


def test_values_in_the_keys_are_converted_once(small_chunks: Callable[[int, int], None]) -> None:
    small_chunks(32, 1 << 20)
    q, k, v = latents(3, 100)
    span = torch.zeros(3, dtype=torch.int64), torch.tensor([100, 100, 100])
    with Recorder() as views:
        out, lse = run(q, k, v, *span, scale=0.2)
    with Recorder() as apart:
        expected = run(q, k, v.clone(), *span, scale=0.2)
    assert torch.equal(out, expected.out)
    assert torch.equal(lse, expected.lse)
    converted = [
        [shapes[1] for shapes in seen.shapes("copy_") if shapes[1][1:] in ((32, 24), (32, 16))]
        for seen in (views, apart)
    ]
    assert converted[0] == [(1, 32, 24)] * 3
    assert len(converted[1]) == 6


def test_other_views_of_the_same_memory_are_no_prefix(
    small_chunks: Callable[[int, int], None],
) -> None:
    small_chunks(8, 1 << 20)
    storage = torch.randn(40 * 2 * 16).bfloat16()
    k = storage.view(40, 2, 16)
    q, span = tensors(1, 40)[0], (torch.tensor([0]), torch.tensor([40]))
    later = k[..., 5:]
    narrow = storage[: 40 * 2 * 8].view(40, 2, 8)
    wide = storage.as_strided((20, 2, 20), k.stride())
    for keys, values in ((k, later), (k, narrow), (k[:20], wide)):
        check(q, keys, values, span[0], torch.tensor([len(keys)]))


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 1, 576), (8, 4, 128)])
def test_no_copy_of_all_keys_is_made(heads: int, kv_heads: int, dim: int) -> None:
    keys = 4 * backend.CHUNK // (kv_heads * dim)
    q, k, v = tensors(1, keys, heads, kv_heads, dim, dim // 2)
    with Recorder() as made:
        run(q, k, v, torch.tensor([0]), torch.tensor([keys]), scale=0.1)
    assert backend.CHUNK * 3 < made.largest <= backend.CHUNK * 4


def test_waiting_partials_are_bounded(small_chunks: Callable[[int, int], None]) -> None:
    """Two partials of 20 rows pass the bound, so no merge sees more; with room there is one."""
    q, k, v = tensors(20, 40, 6, 2, value_dim=8)
    counts = []
    for scores in (4 * 6 * 20, 1 << 20):
        small_chunks(4, scores)
        with Recorder() as made:
            run(q, k, v, torch.zeros(20).long(), torch.full((20,), 40), scale=0.2)
        assert len(made.shapes("bmm")) == 2 * 10
        counts.append(len(made.shapes("stack")))
    assert counts == [9, 1]


def test_keys_that_no_row_of_a_part_sees_are_left_out(
    small_chunks: Callable[[int, int], None],
) -> None:
    """A causal square costs about half of it."""
    small_chunks(16, 16 * 16 * 2)
    q, k, v = tensors(128, 128, 2, 1)
    steps = torch.arange(128)
    with Recorder() as made:
        run(q, k, v, torch.zeros_like(steps), steps + 1, scale=0.25)
    assert len(made.shapes("bmm")) == 2 * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8)


def test_fp32_and_fp64_know_no_chunks(small_chunks: Callable[[int, int], None]) -> None:
    q, k, v = tensors(5, 50, value_dim=9)
    lo, hi = torch.zeros(5).long(), torch.arange(46, 51)
    for dtype in (torch.float32, torch.float64):
        wide = [t.to(dtype) for t in (q, k, v)]
        expected = run(*wide, lo, hi, scale=0.25)
        small_chunks(8, 100)
        out, lse = run(*wide, lo, hi, scale=0.25)
        assert torch.equal(out, expected.out)
        assert torch.equal(lse, expected.lse)


@pytest.mark.parametrize("shared", [False, True])
def test_chunks_have_gradients(small_chunks: Callable[[int, int], None], shared: bool) -> None:
    small_chunks(4, 1 << 20)
    lo, hi = torch.tensor([0, 2, 5]), torch.tensor([9, 11, 5])

    def gradients(dtype: torch.dtype, attention: Any) -> list[Tensor]:
        q, k, v = latents(3, 11, dim=6, value_dim=5)
        q, k = q.detach().to(dtype).requires_grad_(), k.detach().to(dtype).requires_grad_()
        v = k[..., :5] if shared else k.detach()[..., :5]
        attention(q, k, v).float().square().sum().backward()
        assert q.grad is not None and k.grad is not None
        return [q.grad.double(), k.grad.double()]

    got = gradients(torch.bfloat16, lambda q, k, v: run(q, k, v, lo, hi, scale=0.3).out)
    whole = gradients(torch.bfloat16, lambda q, k, v: plain(q, k, v, lo, hi, torch.float32, 0.3)[0])
    exact = gradients(torch.float64, lambda q, k, v: plain(q, k, v, lo, hi, torch.float64, 0.3)[0])
    for g, w, e in zip(got, whole, exact, strict=True):
        assert (g - e).abs().max() <= 2 * (w - e).abs().max()
        assert g.any()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("kv_heads", [1, 3])
@pytest.mark.parametrize("group", range(1, 10))
def test_few_rows_take_keys_on_the_left(
    monkeypatch: pytest.MonkeyPatch, group: int, kv_heads: int, softcap: float | None
) -> None:
    monkeypatch.setattr(backend, "FEW_ROWS_BYTES", 1)
    q, k, v = tensors(1, 50, group * kv_heads, kv_heads, value_dim=9, dtype=torch.float32)
    lo, hi = torch.tensor([3]), torch.tensor([50])
    with Recorder() as made:
        out, lse = run(q, k, v, lo, hi, scale=0.25, softcap=softcap)
    exact, exact_lse = plain(q, k, v, lo, hi, torch.float64, 0.25, softcap)
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)
    left = made.shapes("bmm")[0][0] == (kv_heads, 47, 16)
    assert left == (group <= 8)


def test_where_keys_on_the_left_do_not_pay() -> None:
    """Fewer keys, rows of keys that lie apart, and fp64."""
    keys = backend.FEW_ROWS_BYTES // (2 * 64 * 4)
    q, k, v = tensors(1, keys, 4, 2, 64, 9, torch.float32)
    lo, hi = torch.tensor([0]), torch.tensor([keys])
    apart = k.contiguous()
    cases = [
        ((q, k, v, hi), True),
        ((q, k[1:], v[1:], hi - 1), False),
        ((q, apart, v, hi), False),
        ((q.double(), k.double(), v.double(), hi), False),
    ]
    exact, exact_lse = plain(q, k, v, lo, hi, torch.float64, 0.125)
    for (*given, stop), left in cases:
        with Recorder() as made:
            out, lse = run(*given, lo, stop, scale=0.125)
        assert (made.shapes("bmm")[0][0] == (2, len(given[1]), 64)) == left
        if int(stop) == keys:
            torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5)
            torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-6, atol=1e-5)


def test_few_rows_have_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "FEW_ROWS_BYTES", 1)
    q, k, v = (t.detach() for t in tensors(1, 9, 3, 1, 6, 5, torch.float32))
    lo, hi = torch.tensor([0]), torch.tensor([9])
    results = []
    for dtype in (torch.float32, torch.float64):
        leaves = [t.to(dtype).clone().requires_grad_() for t in (q, k, v)]
        if dtype == torch.float32:
            out = run(*leaves, lo, hi, scale=0.3).out
        else:
            out = plain(*leaves, lo, hi, dtype, 0.3)[0]
        out.square().sum().backward()
        results.append([t.grad for t in leaves])
    for got, exact in zip(*results, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
def test_auto_takes_it_for_latents(dtype: torch.dtype) -> None:
    q, k, v = latents(2, 30)
    q, k = q.to(dtype), k.to(dtype)
    v = k[..., : v.shape[2]]
    assert select(q, k, v) == "math"
    with pytest.raises(ConfigError, match="v is a part of k"):
        attend(q, k, v, torch.tensor([0, 0]), torch.tensor([3, 30]), scale=1.0, backend="flash_cpu")
    assert "math" in available_backends(q, k, v)
