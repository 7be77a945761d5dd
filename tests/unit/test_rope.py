"""`apply_rope` against transformers' own function."""

from __future__ import annotations

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from cplayers.ops import apply_rope


@pytest.mark.parametrize(("tokens", "heads", "dim"), [(1, 1, 2), (7, 3, 16), (5, 2, 62), (0, 2, 8)])
def test_equals_transformers_bit_for_bit(tokens: int, heads: int, dim: int) -> None:
    x = torch.randn(tokens, heads, dim)
    angles = torch.arange(tokens).unsqueeze(1) * 10000.0 ** (-torch.arange(dim // 2) * 2 / dim)
    cos, sin = (torch.cat([f, f], -1) for f in (angles.cos(), angles.sin()))
    before = x.clone()
    batch = x.transpose(0, 1).unsqueeze(0)
    expected, _ = apply_rotary_pos_emb(batch, batch, cos.unsqueeze(0), sin.unsqueeze(0))
    assert torch.equal(apply_rope(x, cos, sin), expected[0].transpose(0, 1))
    assert torch.equal(x, before)


def test_keeps_the_length_of_every_pair() -> None:
    x, angle = torch.randn(4, 2, 8), torch.randn(4, 4)
    cos, sin = (torch.cat([f, f], -1) for f in (angle.cos(), angle.sin()))
    rotated = apply_rope(x, cos, sin)
    torch.testing.assert_close(
        rotated[..., :4] ** 2 + rotated[..., 4:] ** 2, x[..., :4] ** 2 + x[..., 4:] ** 2
    )
    assert not torch.allclose(rotated, x)


def test_keeps_the_dtype() -> None:
    x = torch.randn(3, 2, 8, dtype=torch.bfloat16)
    assert apply_rope(x, x[:, 0], x[:, 1]).dtype == torch.bfloat16
