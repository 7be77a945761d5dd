"""What `test_kernels_interpreter` runs in a process of its own, under Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import (
    ATTENTION,
    B16,
    F32,
    MERGES,
    PACKS,
    WRITES,
    check_attention,
    check_far_heads,
    check_merge,
    check_pack,
    check_write,
)
from layer_cases import check_layer, check_replayed
from torch import Tensor

from cplayers.cache.view import Writes
from cplayers.ops import Partial, by_device
from cplayers.ops.backends.triton import TRITON
from cplayers.ops.device import DTYPES
from cplayers.ops.kernels.launch import Launch
from cplayers.ops.kernels.span_kernel import span_kernel
from cplayers.ops.kernels.write import write_kernel
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


@pytest.mark.parametrize("name", WRITES)
def test_write(name: str) -> None:
    check_write(WRITES[name], "cpu")


def test_the_backend_conforms() -> None:
    dtypes = [torch.float32, torch.bfloat16]
    check_backend(TRITON.run, dtypes=dtypes, softcap=True, value_dim=True)


ON_A_GPU = ("cplayers.ops.by_device", "cplayers.ops.backends.triton")


@pytest.mark.parametrize(("name", "dtype"), [("gqa", F32), ("windowed", F32), ("mla", B16)])
def test_layers_run_on_kernels(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a layer does on a GPU, except for where its tensors are."""
    launched = set()
    run = Launch.run

    def recorded(launch: Launch) -> None:
        launched.add(launch.kernel)
        run(launch)

    def refuse(*tensors: Tensor) -> str | None:
        """Tensors on the CPU count as being on a GPU here."""
        return None if all(t.dtype in DTYPES for t in tensors) else "fp64"

    monkeypatch.setattr(Launch, "run", recorded)
    monkeypatch.setattr(Writes, "of", classmethod(lambda cls, slots, device: cls(slots=slots)))
    for module in ON_A_GPU:
        monkeypatch.setattr(f"{module}.refuse_kernels", refuse)
    check_layer(name, dtype, "cpu", "triton")
    check_replayed(name, "cpu", lambda step: step)
    assert launched == {span_kernel, write_kernel}


@pytest.mark.parametrize("parts", [1, 3])
def test_messages_by_kernel_are_those_by_torch(parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    partial = Partial(torch.randn(5, 6, 33).bfloat16(), torch.randn(5, 6))
    plain = by_device.pack(partial, parts=parts)
    merged = by_device.merge_packed(plain, B16)
    monkeypatch.setattr(by_device, "refuse_kernels", lambda *tensors: None)
    packed = by_device.pack(partial, parts=parts)
    assert packed.shape == plain.shape == (parts, 5, 6 // parts, 35)
    assert torch.equal(packed.view(torch.int16), plain.view(torch.int16))
    for got, wanted in zip(by_device.merge_packed(packed, B16), merged, strict=True):
        torch.testing.assert_close(got, wanted, rtol=2**-8, atol=2**-8)
