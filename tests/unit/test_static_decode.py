"""Decode steps in static buffers: compiled once, they equal the layer on plans of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from cplayers.attention import DCPGQAAttention, DCPMLAAttention
from cplayers.cache import InterleavedLayout, PagedKVCache
from cplayers.cache.static import StaticDecode
from cplayers.errors import ConfigError, StateError
from cplayers.mesh import CPMesh, Topology

MESH = CPMesh(Topology())


@pytest.fixture(autouse=True)
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> Iterator[None]:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"):
        monkeypatch.setenv(name, str(tmp_path))  # torch sets them; undone afterwards
    monkeypatch.delenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True), torch.no_grad():
        yield
    torch._dynamo.reset()


def gqa(window: int | None) -> nn.Module:
    return DCPGQAAttention(64, 8, 2, 16, layer_idx=0, window=window, mesh=MESH)


def mla(window: int | None) -> nn.Module:
    return DCPMLAAttention(64, 4, None, 32, 16, 16, 16, layer_idx=0, mesh=MESH)


def angles(positions: Tensor) -> tuple[Tensor, Tensor]:
    turn = (positions[:, None] / 100.0 ** (torch.arange(8) / 8)).repeat(1, 2)
    return turn.cos(), turn.sin()


@pytest.mark.parametrize(("build", "window"), [(gqa, None), (gqa, 9), (mla, None)])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")  # torch's own
def test_compiled_whole_and_once(build: object, window: int | None, backend: str) -> None:
    """Lengths, blocks, a fork and the number of sequences change; what is compiled does not."""
    torch.manual_seed(0)
    layer = build(window)  # type: ignore[operator]
    cache = PagedKVCache(layer.cache_spec, InterleavedLayout(1, 3, 4), 1, 64)
    for seq, new in (("a", 13), ("b", 7)):
        cache.add(seq)
        plan = cache.plan([(seq, new)])
        layer(torch.randn(new, 64), angles(plan.positions), cache, plan)
        cache.commit(plan)
    buffers = StaticDecode(cache, 4, new_tokens=2, windows=[window])
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    for step in range(9):
        if step == 3:
            cache.fork("a", "c")
        if step == 6:
            cache.truncate("b", 5)
        running = [("b", 1), ("a", 1 + step % 2)] + [("c", 1)] * (3 <= step < 7)
        plan = cache.plan(running)
        x = torch.zeros(4, 64)
        x[: plan.num_rows] = torch.randn(plan.num_rows, 64)
        wanted = layer(x[: plan.num_rows], angles(plan.positions), cache, plan)
        before = [p.clone() for p in cache.storage.stores(0)]
        static = buffers.load(plan)
        found = compiled(x, angles(static.positions), cache, static)
        torch.testing.assert_close(found[: plan.num_rows], wanted, rtol=1e-5, atol=1e-6)
        for plane, old in zip(cache.storage.stores(0), before, strict=True):
            torch.testing.assert_close(plane, old, rtol=1e-5, atol=1e-6)
        cache.commit(plan)


def test_rows_of_nobody_write_nothing_and_see_nothing() -> None:
    layer = gqa(None)
    cache = PagedKVCache(layer.cache_spec, InterleavedLayout(1, 4, 4), 1, 8)  # type: ignore[arg-type]
    buffers = StaticDecode(cache, 2)
    before = [plane.normal_().clone() for plane in cache.storage.stores(0)]
    step = buffers.load(cache.plan([]))
    y = layer(torch.randn(2, 64), angles(step.positions), cache, step)
    assert torch.equal(y, torch.zeros(2, 64))
    for plane, old in zip(cache.storage.stores(0), before, strict=True):
        assert torch.equal(plane, old)


def test_what_does_not_fit_is_refused() -> None:
    cache = PagedKVCache(gqa(None).cache_spec, InterleavedLayout(1, 4, 4), 1, 16)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="rows=0"):
        StaticDecode(cache, 0)
    buffers = StaticDecode(cache, 1, max_tokens=12)
    for seq in "ab":
        cache.add(seq)
    prompt = cache.plan([("a", 12)])
    with pytest.raises(ConfigError, match=r"12 of prompts.*run prompts without buffers"):
        buffers.load(prompt)
    cache.commit(prompt)
    stale = cache.plan([("a", 1)])
    cache.plan([("a", 1)])
    with pytest.raises(StateError, match="stale"):
        buffers.load(stale)
    cache.commit(cache.plan([("a", 1), ("b", 3)]))
    with pytest.raises(StateError, match="grown and lies elsewhere"):
        buffers.load(cache.plan([("a", 1)]))
    buffers = StaticDecode(cache, 4)
    with pytest.raises(ConfigError, match=r"up to 2 of a sequence.*1 of a sequence"):
        buffers.load(cache.plan([("a", 2)]))
    cache.grow(17)
    with pytest.raises(StateError, match="grown and lies elsewhere"):
        buffers.load(cache.plan([("a", 1)]))


@pytest.mark.parametrize("rows", [1, 40])
def test_what_a_layer_reads_besides_block_tables_is_refused(rows: int) -> None:
    cache = PagedKVCache(gqa(None).cache_spec, InterleavedLayout(1, 4, 4), 1, 16)  # type: ignore[arg-type]
    step = StaticDecode(cache, rows).load(cache.plan([]))
    x, turn = torch.randn(rows, 64), angles(step.positions)
    assert gqa(None)(x, turn, cache, step).shape == (rows, 64)
    with pytest.raises(StateError, match=r"windows=\[None\], not window=8"):
        gqa(8)(x, turn, cache, step)
    for ask in (lambda: step.last, lambda: step.decode_context, step.reads):
        with pytest.raises(StateError, match="static buffers"):
            ask()
    assert step.middle is None
    latent = PagedKVCache(mla(None).cache_spec, InterleavedLayout(1, 4, 4), 1, 16)  # type: ignore[arg-type]
    step = StaticDecode(latent, rows).load(latent.plan([]))
    for decode in ("auto", "gather_kv"):
        layer = DCPMLAAttention(64, 4, None, 32, 16, 16, 16, layer_idx=0, decode=decode, mesh=MESH)
        if decode == "auto":
            assert layer(x, turn, latent, step).shape == (rows, 64)
        else:
            with pytest.raises(StateError, match="cannot be gathered"):
                layer(x, turn, latent, step)


def test_modes_may_change_between_steps() -> None:
    """What is made in inference mode is written outside of it, and the other way round."""
    layer = gqa(None)
    with torch.inference_mode():
        cache = PagedKVCache(layer.cache_spec, InterleavedLayout(1, 4, 4), 1, 16)  # type: ignore[arg-type]
        buffers = StaticDecode(cache, 4)
    for turn, mode in enumerate((torch.inference_mode, torch.no_grad) * 2):
        with mode():
            cache.add(turn)
            plan = cache.plan([(turn, 9)])
            layer(torch.randn(9, 64), angles(plan.positions), cache, plan)
            cache.commit(plan)
            step = buffers.load(cache.plan([(turn, 1)]))
            layer(torch.randn(4, 64), angles(step.positions), cache, step)


def test_a_backend_without_block_tables_is_refused() -> None:
    layer = DCPGQAAttention(64, 8, 2, 16, layer_idx=0, backend="math", mesh=MESH)
    cache = PagedKVCache(layer.cache_spec, InterleavedLayout(1, 4, 4), 1, 8)
    step = StaticDecode(cache, 2).load(cache.plan([]))
    with pytest.raises(StateError, match=r"static buffers.*local_backends"):
        layer(torch.randn(2, 64), angles(step.positions), cache, step)
