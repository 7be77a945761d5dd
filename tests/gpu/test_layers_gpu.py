"""Layers, the cache and the other backends on a CUDA device, degree 1."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from layer_cases import LAYERS, check_layer, check_replayed
from varlen_cases import STEPS, check_steps

from cplayers.cache import GQASpec, InterleavedLayout, PagedKVCache
from cplayers.ops import Partial, by_device, plain, select, select_paged
from cplayers.ops.backends.varlen import VARLEN
from cplayers.testing import check_backend

pytestmark = pytest.mark.gpu

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HALVES = DTYPES[1:]


@pytest.fixture
def varlen() -> None:
    q = torch.zeros(1, 1, 64, device="cuda", dtype=torch.bfloat16)
    refused = VARLEN.refuse(q, q, q, None)
    if refused is not None:
        # An optional part of torch: what it refuses, and why, is asserted on CPUs in test_varlen.
        pytest.skip(f"backend varlen: {refused}")


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph of ``step``, which runs a few times first, to compile kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@pytest.mark.parametrize("backend", ["auto", "triton", "math"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_equals_the_cpu_in_fp64(name: str, dtype: torch.dtype, backend: str) -> None:
    check_layer(name, dtype, "cuda", backend)


@pytest.mark.usefixtures("varlen")
@pytest.mark.parametrize("name", ["gqa", "windowed"])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_a_layer_on_varlen(name: str, dtype: torch.dtype) -> None:
    check_layer(name, dtype, "cuda", "varlen")


@pytest.mark.parametrize("name", LAYERS)
def test_a_decode_step_is_captured_once(name: str) -> None:
    check_replayed(name, "cuda", captured)


@pytest.mark.usefixtures("varlen")
def test_varlen_conforms() -> None:
    check_backend(VARLEN.run, dtypes=HALVES, device="cuda")


@pytest.mark.usefixtures("varlen")
@pytest.mark.parametrize("name", STEPS)
def test_varlen_on_pages(name: str) -> None:
    check_steps(name, "cuda")


def test_auto_is_triton_on_pages_and_off() -> None:
    cache = PagedKVCache(GQASpec(2, 64), InterleavedLayout(1, 1, 16), 1, 4, device="cuda")
    stores = cache.storage.stores(0)
    q = torch.zeros(1, 4, 64, device="cuda")
    chosen = select_paged(q, *stores, most_rows=1)
    assert chosen is not None
    assert chosen.name == "triton"
    assert select(q, *(store.transpose(0, 1) for store in stores)) == "triton"


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_messages_have_the_same_bits_as_on_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    out = torch.randn(5, 6, 33, generator=generator).to(dtype)
    lse = torch.randn(5, 6, generator=generator)
    packed = by_device.pack(Partial(out.cuda(), lse.cuda()), parts=3)
    assert torch.equal(
        packed.cpu().view(torch.uint8), plain.pack(Partial(out, lse), parts=3).view(torch.uint8)
    )
    for got, wanted in zip(
        by_device.merge_packed(packed, dtype),
        plain.merge_packed(packed.cpu(), dtype),
        strict=True,
    ):
        eps = max(1e-6, torch.finfo(dtype).eps)
        torch.testing.assert_close(got.cpu(), wanted, rtol=eps, atol=eps)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_the_cache_writes_what_it_writes_on_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    contents = []
    rows = torch.randn(2, 13, 2, 24, generator=generator).to(dtype)
    for device in ("cpu", "cuda"):
        layout = InterleavedLayout(2, 3, 4)
        cache = PagedKVCache(GQASpec(2, 24), layout, 1, 8, 1, dtype, device)
        cache.add("a")
        plan = cache.plan([("a", 13)])
        for writes in plan.prefill_writes:
            cache.write(plan, 0, writes, *rows.to(device))
        contents.append([store.cpu() for store in cache.storage.stores(0)])
    for on_cpu, on_gpu in zip(*contents, strict=True):
        assert on_cpu.any()
        assert torch.equal(on_cpu, on_gpu)
