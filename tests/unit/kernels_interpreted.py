"""What `test_kernels_interpreter` runs in a process of its own, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import (
    ATTENTION,
    MERGES,
    PACKS,
    WRITES,
    check_attention,
    check_far_heads,
    check_merge,
    check_pack,
    check_write,
)

from cplayers.attention.combine import pack as combine_pack
from cplayers.attention.combine import unpack as combine_unpack
from cplayers.ops import Partial
from cplayers.ops.backends.triton import TRITON
from cplayers.ops.kernels import pack, unpack
from cplayers.testing import check_backend


@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name: str) -> None:
    check_attention(ATTENTION[name], "cpu")


def test_attention_over_far_heads() -> None:
    check_far_heads("cpu")


@pytest.mark.parametrize("shape", MERGES, ids=str)
def test_merge(shape: tuple[int, int, int, int, torch.dtype]) -> None:
    check_merge(shape, "cpu")


@pytest.mark.parametrize("shape", PACKS, ids=str)
def test_pack(shape: tuple[int, int, int, torch.dtype, int]) -> None:
    check_pack(shape, "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_packed_bytes_are_those_of_the_layers(dtype: torch.dtype) -> None:
    partial = Partial(torch.randn(5, 4, 33).to(dtype), torch.randn(5, 4))
    packed = pack(partial)
    assert packed.dtype == combine_pack(partial).dtype
    assert torch.equal(packed.view(torch.uint8), combine_pack(partial).view(torch.uint8))
    for ours, theirs in zip(unpack(packed, dtype), combine_unpack(packed, dtype), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("name", WRITES)
def test_write(name: str) -> None:
    check_write(WRITES[name], "cpu")


def test_the_backend_conforms() -> None:
    dtypes = [torch.float32, torch.bfloat16]
    check_backend(TRITON.run, dtypes=dtypes, softcap=True, value_dim=True)
