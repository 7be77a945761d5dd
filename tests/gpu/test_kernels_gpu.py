"""The Triton kernels and the backend on a CUDA device: the interpreter's cases, and larger ones."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_cases import (
    ATTENTION,
    MERGES,
    PACKS,
    WRITES,
    Attention,
    check_attention,
    check_far_heads,
    check_merge,
    check_pack,
    check_write,
    chunk,
    decode,
)

from cplayers.ops import attend
from cplayers.ops.backends.triton import TRITON
from cplayers.testing import check_backend

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DIMS = [(64, 64), (96, 96), (128, 128), (256, 256), (576, 512)]


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str) -> None:
    check_attention(ATTENTION[name], "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), DIMS)
def test_long_decoding(dim: int, value_dim: int, dtype: torch.dtype) -> None:
    case = Attention(
        decode(4097, 0, 1000),
        kv_heads=1 if dim == 576 else 2,
        group=16,
        head_dim=dim,
        value_dim=value_dim,
        latent=dim == 576,
        dtype=dtype,
    )
    check_attention(case, "cuda")
    check_attention(replace(case, num_splits=1), "cuda")
    check_attention(replace(case, num_splits=13, softcap=20.0), "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("dim", "value_dim"), DIMS)
def test_long_chunks(dim: int, value_dim: int, dtype: torch.dtype) -> None:
    case = Attention(
        (chunk(100, 700), chunk(33, 40), chunk(17, 900, 65)),
        group=4,
        head_dim=dim,
        value_dim=value_dim,
        latent=dim == 576,
        dtype=dtype,
    )
    check_attention(case, "cuda")


@pytest.mark.parametrize("tile_rows", [16, 32])
def test_all_heads_of_a_latent(tile_rows: int) -> None:
    case = Attention(
        decode(700, 65),
        group=128,
        head_dim=576,
        value_dim=512,
        latent=True,
        dtype=torch.bfloat16,
        tile_rows=tile_rows,
    )
    check_attention(case, "cuda")


def test_attention_over_far_heads() -> None:
    check_far_heads("cuda")


@pytest.mark.parametrize("shape", MERGES, ids=str)
def test_merge(shape: tuple[int, int, int, int, torch.dtype]) -> None:
    check_merge(shape, "cuda")


@pytest.mark.parametrize("shape", PACKS, ids=str)
def test_pack(shape: tuple[int, int, int, torch.dtype, int]) -> None:
    check_pack(shape, "cuda")


@pytest.mark.parametrize("name", WRITES)
def test_write(name: str) -> None:
    check_write(WRITES[name], "cuda")


def test_the_backend_conforms() -> None:
    check_backend(TRITON.run, dtypes=DTYPES, device="cuda", softcap=True, value_dim=True)


def test_the_backend_takes_what_is_on_the_device() -> None:
    q, k = (torch.randn(5, 4, 64, device="cuda") for _ in range(2))
    assert TRITON.refuse(q, k, k, None) is None
    assert TRITON.refuse(q, k, k, 5.0) is None
    assert TRITON.refuse(q.double(), k.double(), k.double(), None) is not None
    assert TRITON.refuse(q.requires_grad_(), k, k, None) is not None


def test_the_plain_backend_agrees() -> None:
    q, k, v = (torch.randn(37, 4, 64, device="cuda") for _ in range(3))
    hi = torch.arange(1, 38, device="cuda")
    lo = torch.zeros_like(hi)
    out, lse = TRITON.run(q, k, v, lo, hi, scale=0.5)
    theirs = attend(q, k, v, lo, hi, scale=0.5, backend="math")
    assert (out - theirs.out).abs().max() < 1e-5
    assert (lse - theirs.lse).abs().max() < 1e-5
