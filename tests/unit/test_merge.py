"""`Partial` and its merge: worked values, foreign lse, sinks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from cplayers.ops import (
    Partial,
    add_sink,
    attention_reference,
    empty,
    merge,
    merge_stacked,
    merge_stream,
    scale_weights,
    weigh,
)

GOLD = json.loads((Path(__file__).parents[1] / "gold" / "merge.json").read_text())["merge"]


def numbers(values: list[Any]) -> list[float]:
    return [float(value) for value in values]


def one_row(out: list[list[Any]], lse: list[Any]) -> tuple[Tensor, Tensor]:
    """n partials of one row and one head: out [n, 1, 1, V], lse [n, 1, 1]."""
    return torch.tensor([[[numbers(o)]] for o in out]), torch.tensor([[[x]] for x in numbers(lse)])


@pytest.mark.parametrize("case", GOLD)
def test_worked_values(case: dict[str, Any]) -> None:
    out, lse = one_row(case["out"], case["lse"])
    expected = torch.tensor([[numbers(case["merged"])]])
    expected_lse = torch.tensor([[float(case["merged_lse"])]])
    for merged in (merge_stacked(out, lse), merge(list(map(Partial, out, lse)))):
        torch.testing.assert_close(merged.out, expected, rtol=1e-6, atol=0)
        torch.testing.assert_close(merged.lse, expected_lse, rtol=1e-6, atol=0)


def test_gold_is_there() -> None:
    assert len(GOLD) == 7


@pytest.mark.parametrize("foreign", [math.nan, math.inf, -math.inf])
def test_a_single_partial_is_sanitised(foreign: float) -> None:
    partial = Partial(torch.tensor([[[math.nan]], [[2.0]]]), torch.tensor([[foreign], [1.0]]))
    merged = merge([partial])
    assert merged.out.flatten().tolist() == [0.0, 2.0]
    assert merged.lse.flatten().tolist() == [-math.inf, 1.0]


@pytest.mark.parametrize(("other", "expected"), [(100.0, 100.0), (-1000.0, 0.0)])
def test_far_apart_stays_finite(other: float, expected: float) -> None:
    out, lse = one_row([[1.0], [7.0]], [0.0, other])
    merged = merge_stacked(out, lse)
    assert merged.lse.item() == expected
    assert merged.out.item() == (7.0 if other > 0 else 1.0)


def test_weights_of_sums_two_and_eight() -> None:
    weights, merged = scale_weights(torch.tensor([math.log(2), math.log(8)]))
    torch.testing.assert_close(weights, torch.tensor([0.2, 0.8]))
    assert merged.item() == pytest.approx(math.log(10))


def test_scaling_own_out_and_summing_is_the_merge() -> None:
    out, lse = torch.randn(3, 5, 4, 2), torch.randn(3, 5, 4) * 10
    lse[0, 2] = -math.inf
    weights, _ = scale_weights(lse)
    summed = torch.stack([weigh(out[i], weights[i]) for i in range(3)]).sum(0)
    assert torch.equal(summed, merge_stacked(out, lse).out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_dtypes(dtype: torch.dtype) -> None:
    out = torch.randn(2, 3, 2, 4, dtype=torch.float64).to(dtype)
    lse = torch.randn(2, 3, 2) * 5
    merged = merge_stacked(out, lse)
    assert (merged.out.dtype, merged.lse.dtype) == (dtype, torch.float32)
    weights = torch.softmax(lse.double(), 0).unsqueeze(-1)
    expected = (weights * out.double()).sum(0)
    # The weights are fp32; the result is rounded once to its dtype.
    eps = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    assert (merged.out.double() - expected).abs().max() <= 2 * eps * out.double().abs().max()


def test_empty_is_the_identity() -> None:
    partial = Partial(torch.randn(3, 2, 4), torch.randn(3, 2))
    nothing = empty(3, 2, 4, torch.float32, "cpu")
    assert not nothing.out.any()
    assert nothing.lse.eq(-math.inf).all()
    for merged in (merge([partial, nothing]), merge([nothing, partial])):
        assert torch.equal(merged.out, partial.out)
        assert torch.equal(merged.lse, partial.lse)


def test_merge_of_none_says_what_to_do() -> None:
    with pytest.raises(ValueError, match=r"0 partials.*use empty"):
        merge([])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_a_stream_is_rounded_once(dtype: torch.dtype) -> None:
    """A thousand partials, of which none outweighs the others."""
    generator = torch.Generator().manual_seed(0)
    out = (1 + 0.1 * torch.randn(1000, 2, 3, 4, generator=generator)).to(dtype)
    lse = torch.randn(1000, 2, 3, generator=generator)
    lse[::7] = -math.inf
    merged = merge_stream(Partial(*pair) for pair in zip(out, lse, strict=True))
    assert merged is not None and merged.out.dtype == dtype and merged.lse.dtype == torch.float32
    weights = lse.double().softmax(0)
    exact = (weights[..., None] * out.double()).sum(0)
    assert (merged.out.double() - exact).abs().max() < torch.finfo(dtype).eps / 2 + 2e-6
    torch.testing.assert_close(merged.lse.double(), lse.double().logsumexp(0), rtol=0, atol=1e-4)


def test_a_stream_of_one_is_that_one_and_of_none_is_none() -> None:
    partial = Partial(torch.randn(2, 3, 4).bfloat16(), torch.randn(2, 3))
    merged = merge_stream([partial])
    assert merged is not None
    assert merged.out.equal(partial.out) and merged.lse.equal(partial.lse)
    assert merge_stream([]) is None


def test_sink_is_one_more_logit_per_head() -> None:
    q, k, v = torch.randn(3, 4, 8) * 4, torch.randn(11, 2, 8), torch.randn(11, 2, 8)
    sinks = torch.tensor([-math.inf, -1.0, 0.5, 9.0])
    lo, hi = torch.tensor([0, 2, 0]), torch.tensor([4, 11, 0])
    plain = attention_reference(q, k, v, lo, hi, scale=0.3)
    expected = attention_reference(q, k, v, lo, hi, scale=0.3, sinks=sinks)
    sunk = add_sink(Partial(plain.out.float(), plain.lse.float()), sinks)
    torch.testing.assert_close(sunk.out, expected.out.float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sunk.lse, expected.lse.float(), rtol=1e-6, atol=1e-6)
    assert (sunk.out - plain.out).abs().max() > 0.1


def test_gradients_pass_through() -> None:
    out = torch.randn(3, 2, 2, 2, dtype=torch.float64, requires_grad=True)
    lse = torch.randn(3, 2, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda o, x: merge_stacked(o, x).out, (out, lse))
