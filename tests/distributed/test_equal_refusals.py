"""What cannot work is refused on all ranks alike, also where only some of them have work to do."""

from __future__ import annotations

from typing import Any

import attention_cases
import mla_cases
import pytest
import torch
from torch import Tensor

from cplayers.attention import CachedLayer, PCPPrefillAttention, Visit
from cplayers.cache import GQASpec
from cplayers.errors import ConfigError
from cplayers.mesh import CPMesh, Topology

PCP = Topology(pcp=2, dcp=2)


def attempt(setup: Any, requests: tuple[tuple[str, int], ...], backend: str) -> tuple[str, int]:
    """The refusal of a step, and the length of "a" when the step has been committed or refused."""
    module = mla_cases if isinstance(setup, mla_cases.Setup) else attention_cases
    live = module.build(setup)
    live.layer.scoring = live.layer.scoring._replace(backend=backend)
    live.layer.prefill.backend = backend
    plan = live.plan(requests)
    message = ""
    try:
        live.forward(plan)
        live.cache.commit(plan)
    except ConfigError as error:
        message = str(error)
    return message, live.cache.length("a")


@pytest.mark.parametrize(
    ("setup", "requests", "backend", "message"),
    [
        # rank 1 has no rows of a prompt of one token
        (attention_cases.Setup(PCP, softcap=3.0), (("a", 1),), "flash_cpu", "no softcap, 3.0"),
        (attention_cases.Setup(PCP, dtype=torch.bfloat16), (("a", 1),), "rows_cpu", "too coarse"),
        # 16 rows would be expanded, 15 absorbed
        (mla_cases.Setup(PCP), (("a", 31),), "flash_cpu", "v is a part of k"),
    ],
)
def test_a_backend_is_refused_by_ranks_without_work_too(
    ranks: Any, setup: Any, requests: Any, backend: str, message: str
) -> None:
    answers = ranks(2).run(attempt, setup, requests, backend, n=2)
    for text, length in answers:
        assert message in text
        assert length == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("dtype", "the cache is in torch.float64"),
        ("spec", "the cache has 2 layers of GQASpec"),
        ("layer", "layer 7 that stores"),
        ("angles", "position_embeddings of 1 and 5 rows"),
    ],
)
def test_a_foreign_cache_or_foreign_angles_are_refused(change: str, message: str) -> None:
    live = attention_cases.build(attention_cases.Setup())
    plan = live.plan((("a", 5),))
    x, (cos, sin) = live.inputs(plan)
    if change == "dtype":
        live.cache.dtype = torch.float64
    elif change == "spec":
        live.cache.spec = GQASpec(3, 6)
    elif change == "layer":
        live.layer.layer_idx = 7
    else:
        cos = cos[:1]
    with pytest.raises(ConfigError, match=message):
        live.layer(x, (cos, sin), live.cache, plan)


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expanded() -> list[tuple[float, str]]:
    """Errors of chunks whose keys are expanded on the way, and what ``gather_q`` says to that."""
    from cplayers.cache import InterleavedLayout, PagedKVCache

    mesh = CPMesh(Topology(tp=2, dcp=2))
    cache = PagedKVCache(
        GQASpec(1, 4), InterleavedLayout(2, 3, 4), 1, 60, mesh.rank("dcp"), torch.float32
    )
    cache.add("a")
    lengths, start, found = (270, 20), 0, []
    q, k, v = drawn(290, 2, 4, seed=1), drawn(290, 1, 4, seed=2), drawn(290, 1, 4, seed=3)
    for new in lengths:
        rows = slice(start, start + new)
        plan = cache.plan([("a", new)])
        assert plan.prefill is not None
        error, refusal = 0.0, ""
        for strategy in ("gather_q", "auto"):
            core = PCPPrefillAttention(strategy, mesh=mesh)
            try:
                out, _ = core(
                    q[rows],
                    k[rows],
                    v[rows],
                    plan.prefill,
                    scale=0.5,
                    expand=lambda planes: (3 * planes[0], planes[1]),
                    cached=CachedLayer(cache, plan, 0),
                )
            except ConfigError as raised:
                refusal = str(raised)
                continue
            hidden = torch.arange(290)[None, :] > torch.arange(290)[rows, None]
            logits = 1.5 * torch.einsum("qnh,sh->nqs", q[rows].double(), k[:, 0].double())
            weights = logits.masked_fill(hidden, -torch.inf).softmax(-1)
            exact = torch.einsum("nqs,sv->qnv", weights, v[:, 0].double())
            error = float((out.double() - exact).abs().max())
        cache.commit(plan)
        start += new
        found.append((error, refusal))
    return found


def test_expanded_keys_travel_and_queries_do_not(ranks: Any) -> None:
    for found in ranks(2).run(expanded, n=2):
        for error, refusal in found:
            assert error < 1e-5
            assert "strategy='gather_q'" in refusal and "leave out expand" in refusal


def test_the_core_takes_own_heads() -> None:
    live = attention_cases.build(attention_cases.Setup())
    plan = live.plan((("a", 2),))
    assert plan.prefill is not None
    q, k = torch.zeros(2, 4, 6), torch.zeros(2, 1, 6)
    with pytest.raises(ConfigError, match="visit for replicated queries"):
        live.layer.prefill(q, k, k, plan.prefill, scale=1.0, how=Visit(replicated=True))
