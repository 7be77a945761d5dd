"""`apply_rope` against complex multiplication in float64 and transformers' own functions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from transformers.models.deepseek_v2 import modeling_deepseek_v2 as v2
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as v3
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cplayers.ops import apply_rope, yarn_mscale

SHAPES = [(1, 1, 2), (1, 16, 64), (7, 3, 16), (5, 2, 62), (0, 2, 8)]
both_orders = pytest.mark.parametrize("interleaved", [False, True])


def angles_of(tokens: int, dim: int) -> Tensor:
    """Angle of each pair at each position, `[tokens, dim/2]`, float64."""
    frequencies = 10000.0 ** (-torch.arange(dim // 2, dtype=torch.float64) * 2 / dim)
    return (torch.arange(tokens) + 3).unsqueeze(1) * frequencies


def cos_sin(angles: Tensor, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    cos, sin = (torch.cat([f, f], -1).to(dtype) for f in (angles.cos(), angles.sin()))
    return cos, sin


def pairs_of(x: Tensor, interleaved: bool) -> Tensor:
    """The two elements of each pair in the last dimension, `[..., R/2, 2]`."""
    half = x.shape[-1] // 2
    if interleaved:
        return x.reshape(*x.shape[:-1], half, 2)
    return torch.stack([x[..., :half], x[..., half:]], -1)


def times_unit_numbers(x: Tensor, angles: Tensor, interleaved: bool) -> Tensor:
    """Every pair as a complex number times e^(i angle), as pairs, in float64."""
    numbers = torch.view_as_complex(pairs_of(x.double(), interleaved).contiguous())
    return torch.view_as_real(numbers * torch.exp(1j * angles).unsqueeze(1))


@both_orders
@pytest.mark.parametrize(("tokens", "heads", "dim"), SHAPES)
def test_equals_complex_multiplication(
    tokens: int, heads: int, dim: int, interleaved: bool
) -> None:
    angles = angles_of(tokens, dim)
    for dtype, bound in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        x = torch.randn(tokens, heads, dim, dtype=dtype) * 4
        before = x.clone()
        out = apply_rope(x, *cos_sin(angles, dtype), interleaved=interleaved)
        assert out.shape == x.shape
        assert out.dtype == dtype
        expected = times_unit_numbers(x, angles, interleaved)
        got = pairs_of(out.double(), interleaved)
        torch.testing.assert_close(got, expected, rtol=0, atol=bound)
        assert torch.equal(x, before)


def test_the_orders_differ_by_a_permutation() -> None:
    x, angles = torch.randn(6, 3, 14, dtype=torch.float64), angles_of(6, 14)
    cos, sin = cos_sin(angles, torch.float64)
    halves = torch.arange(14).view(2, 7).T.flatten()  # 0, 7, 1, 8, ...
    interleaved = apply_rope(x[..., halves], cos, sin, interleaved=True)
    torch.testing.assert_close(
        interleaved, apply_rope(x, cos, sin)[..., halves], rtol=0, atol=1e-12
    )
    assert not torch.allclose(interleaved, apply_rope(x[..., halves], cos, sin))


@pytest.mark.parametrize(("tokens", "heads", "dim"), SHAPES)
def test_equals_transformers_bit_for_bit(tokens: int, heads: int, dim: int) -> None:
    x, (cos, sin) = torch.randn(tokens, heads, dim), cos_sin(angles_of(tokens, dim))
    batch = x.transpose(0, 1).unsqueeze(0)
    expected, _ = apply_rotary_pos_emb(batch, batch, cos.unsqueeze(0), sin.unsqueeze(0))
    assert torch.equal(apply_rope(x, cos, sin), expected[0].transpose(0, 1))


def test_equals_deepseek_v2() -> None:
    """Its angles come as complex numbers, and its order is that of the input."""
    q, k, angles = torch.randn(5, 3, 16) * 4, torch.randn(5, 1, 16), angles_of(5, 16)
    numbers = torch.exp(1j * angles).to(torch.complex64).unsqueeze(0)
    batches = (t.transpose(0, 1).unsqueeze(0) for t in (q, k))
    for x, expected in zip((q, k), v2.apply_rotary_emb(*batches, numbers), strict=True):
        out = apply_rope(x, *cos_sin(angles), interleaved=True)
        torch.testing.assert_close(out, expected[0].transpose(0, 1), rtol=0, atol=1e-6)


@both_orders
def test_products_equal_those_of_deepseek_v3(interleaved: bool) -> None:
    """Its interleaved form moves the elements of a pair apart, which no product of q and k sees."""
    q, k = torch.randn(9, 4, 16) * 4, torch.randn(9, 1, 16)
    cos, sin = cos_sin(angles_of(9, 16))
    theirs = v3.apply_rotary_pos_emb_interleave if interleaved else v3.apply_rotary_pos_emb
    batches = (t.transpose(0, 1).unsqueeze(0) for t in (q, k))
    their_q, their_k = theirs(*batches, cos.unsqueeze(0), sin.unsqueeze(0))
    our_q, our_k = (apply_rope(t, cos, sin, interleaved=interleaved) for t in (q, k))
    products = torch.einsum("tnr,smr->nts", our_q, our_k)
    torch.testing.assert_close(products, (their_q @ their_k.mT)[0], rtol=0, atol=1e-4)
    other = apply_rope(k, cos, sin, interleaved=not interleaved)
    assert not torch.allclose(torch.einsum("tnr,smr->nts", our_q, other), products, atol=0.1)


@both_orders
def test_keeps_the_length_of_every_pair(interleaved: bool) -> None:
    x = torch.randn(4, 2, 8)
    rotated = apply_rope(x, *cos_sin(torch.randn(4, 4)), interleaved=interleaved)
    before, after = (pairs_of(t, interleaved).square().sum(-1) for t in (x, rotated))
    torch.testing.assert_close(after, before)
    assert not torch.allclose(rotated, x)


@both_orders
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_err_by_their_rounding(interleaved: bool, dtype: torch.dtype) -> None:
    x, angles = (torch.randn(50, 4, 32) * 4).to(dtype), angles_of(50, 32)
    cos, sin = cos_sin(angles, dtype)
    out = apply_rope(x, cos, sin, interleaved=interleaved)
    assert out.dtype == dtype
    error = pairs_of(out.double(), interleaved) - times_unit_numbers(x, angles, interleaved)
    # Each of cos, sin, the products and the sum is rounded once, all below the longest pair.
    assert error.abs().max() < 3 * torch.finfo(dtype).eps * x.abs().max()


@both_orders
@pytest.mark.parametrize("offset", [3, 4])
@pytest.mark.parametrize(("rows", "heads"), [(5, 2), (1, 2), (1, 1)])
def test_takes_slices_of_a_wider_projection(
    interleaved: bool, offset: int, rows: int, heads: int
) -> None:
    """Odd strides and offsets too, which a complex view alone refuses; one row is contiguous."""
    wide = torch.randn(rows, heads, offset + 8)
    x, (cos, sin) = wide[..., offset:], cos_sin(angles_of(rows, 8))
    out = apply_rope(x, cos, sin, interleaved=interleaved)
    assert torch.equal(out, apply_rope(x.clone(), cos, sin, interleaved=interleaved))


@both_orders
def test_has_gradients(interleaved: bool) -> None:
    x, cos_and_sin = torch.randn(3, 2, 6), cos_sin(angles_of(3, 6), torch.float64)
    x = x.double().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: apply_rope(x, *cos_and_sin, interleaved=interleaved), (x,)
    )


@pytest.mark.parametrize(
    ("factor", "mscale", "expected"),
    [
        (0.5, 1.0, 1.0),
        (1.0, 1.0, 1.0),
        (math.e, 1.0, 1.1),
        (math.e**2, 0.5, 1.1),
        (40.0, 0.0, 1.0),
        (40.0, 1.0, 1.3688879454113936),
    ],
)
def test_yarn_mscale(factor: float, mscale: float, expected: float) -> None:
    assert yarn_mscale(factor, mscale) == pytest.approx(expected, rel=1e-15)
    assert yarn_mscale(factor, mscale) == v3.yarn_get_mscale(factor, mscale)
