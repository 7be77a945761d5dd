"""Backend "varlen" without a GPU: what it refuses, and what it hands to torch's varlen_attn.

Its definition in float64 stands in for ``varlen_attn``, and demands of its arguments what
FlashAttention 2 in torch does.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen as torch_varlen
from torch import Tensor
from varlen_cases import STEPS, check_steps

from cplayers import ConfigError
from cplayers.cache import GQASpec, InterleavedLayout, PagedKVCache
from cplayers.ops import PagedKeys, Partial, attend, attend_paged, attention_reference
from cplayers.ops.backends import varlen
from cplayers.ops.backends.varlen import CAUSAL, FULL, PAGE, VARLEN, missing_arguments, sequences
from cplayers.testing import check_backend

B16 = torch.bfloat16


def definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any,
    scale: float,
    window_size: tuple[int, int] = FULL,
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor]:
    """varlen_attn for keys that are all there, or on pages."""
    integers = [cu_seq_q, cu_seq_k, *(t for t in (seqused_k, block_table) if t is not None)]
    assert all(t.dtype == torch.int32 and t.is_contiguous() for t in integers)
    assert query.dtype == key.dtype == value.dtype == B16
    assert query.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    assert key.stride(-1) == value.stride(-1) == query.stride(-1) == 1
    assert return_aux.lse and enable_gqa
    assert window_size in (FULL, CAUSAL)
    edges, key_edges = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert len(edges) == len(key_edges) >= 2
    assert edges[0] == 0 and edges[-1] == len(query)
    assert max(b - a for a, b in pairwise(edges)) == max_q
    if block_table is not None:
        assert seqused_k is not None and num_splits == 1
        assert key.shape[1] % 256 == 0
        assert len(block_table) == len(seqused_k) == len(edges) - 1
    out = torch.full(query.shape, math.nan, dtype=query.dtype)
    lse = torch.full((query.shape[1], len(query)), math.nan)
    for i, (row0, row1) in enumerate(pairwise(edges)):
        if block_table is None or seqused_k is None:
            used = key_edges[i + 1] - key_edges[i]
            k, v = (t[key_edges[i] : key_edges[i + 1]] for t in (key, value))
        else:
            used = int(seqused_k[i])
            ids = block_table[i, : -(-used // key.shape[1])].long()
            k, v = (t[ids].flatten(0, 1)[:used] for t in (key, value))
        assert used <= max_k
        hi = torch.full((row1 - row0,), used)
        if window_size == CAUSAL:  # aligned to the last key
            hi = hi - torch.arange(row1 - row0).flip(0)
        rows = query[row0:row1]
        one = attention_reference(rows, k, v, torch.zeros_like(hi), hi, scale=scale)
        out[row0:row1] = one.out.to(query.dtype)
        lse[:, row0:row1] = one.lse.T.float()
    lse[lse == -math.inf] = math.inf  # as FlashAttention 2 marks rows without keys
    return out, lse


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_varlen, "varlen_attn", definition)


@pytest.mark.usefixtures("stand_in")
def test_contiguous_keys_conform() -> None:
    check_backend(VARLEN.run, dtypes=[B16])


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("name", STEPS)
def test_steps_on_pages(name: str) -> None:
    check_steps(name, "cpu")


@pytest.mark.usefixtures("stand_in")
def test_a_row_without_keys_is_empty() -> None:
    table = torch.zeros(1, 1, dtype=torch.int32)
    zero = torch.zeros(1, dtype=torch.int64)
    cache = torch.full((1, PAGE, 8), math.nan, dtype=B16)
    keys = PagedKeys(table, PAGE, zero, zero, zero, 1, (1,))
    assert VARLEN.paged is not None
    out, lse = VARLEN.paged(torch.ones(1, 2, 8, dtype=B16), cache, cache, keys, scale=1.0)
    assert not out.any()
    assert (lse == -math.inf).all()


def test_sequences_of_a_mixed_step() -> None:
    """Requests of 2, 0 and 3 rows in rows 4, 0 and 7 of the table."""
    request = torch.tensor([4, 4, 7, 7, 7])
    hi = torch.tensor([10, 11, 3, 4, 5])
    table = torch.arange(16, dtype=torch.int32).view(8, 2)
    keys = PagedKeys(table, PAGE, request, torch.zeros_like(hi), hi, 3, (2, 0, 3))
    found = sequences(keys)
    assert found.edges.tolist() == [0, 2, 5]
    assert found.used.tolist() == [11, 5]
    assert found.block_table.tolist() == [[8, 9], [14, 15]]
    assert found.most_rows == 3


def test_only_steps_that_are_lengths_on_pages_are_taken() -> None:
    def plan_of(block: int, cp_size: int, new: int) -> Any:
        cache = PagedKVCache(GQASpec(1, 8), InterleavedLayout(cp_size, 1, block), 1, 8)
        cache.add("a")
        cache.commit(cache.plan([("a", 9)]))
        return cache.plan([("a", new)])

    assert varlen.takes(plan_of(PAGE, 1, 1).paged())
    assert varlen.takes(plan_of(2 * PAGE, 1, 3).paged())
    assert varlen.takes(plan_of(PAGE, 2, 1).paged())
    assert not varlen.takes(plan_of(PAGE, 2, 3).paged()), "rows of a shard are not causal"
    assert not varlen.takes(plan_of(PAGE, 1, 1).paged(5)), "a window"
    assert not varlen.takes(plan_of(PAGE // 2, 1, 1).paged()), "small pages"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": torch.float32}, "it takes bf16 and fp16, not torch.float32"),
        ({"dim": 260}, "H = V up to 256 in steps of 8, got H=260"),
        ({"dim": 12}, "steps of 8, got H=12"),
        ({"value_dim": 32}, "got H=64, V=32"),
        ({"softcap": 5.0}, "no softcap, 5.0"),
    ],
)
def test_what_flash_attention_cannot_do(change: dict[str, Any], message: str) -> None:
    shape = {"dtype": B16, "dim": 64, "value_dim": None, "softcap": None} | change
    dim, value_dim = shape["dim"], shape["value_dim"] or shape["dim"]
    q, v = (torch.zeros(3, 4, n, dtype=shape["dtype"]) for n in (dim, value_dim))
    refused = varlen.refuse_shapes(q, q, v, shape["softcap"])
    assert refused is not None
    assert message in refused
    q = torch.zeros(3, 4, 64, dtype=B16)
    assert varlen.refuse_shapes(q, q, q, None) is None
    assert varlen.refuse_shapes(q.mT.contiguous().mT, q, q, None) is not None


def test_the_cpu_is_refused_by_name_and_nothing_takes_its_place() -> None:
    q, spans = torch.zeros(1, 1, 64, dtype=B16), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(
        ConfigError, match='backend="varlen": it runs on CUDA devices, not on the cpu'
    ):
        attend(q, q, q, spans, spans, scale=1.0, backend="varlen")
    table = torch.zeros(1, 1, dtype=torch.int32)
    keys = PagedKeys(table, 1, spans, spans, spans, 1)
    assert attend_paged(q, q, q, keys, scale=1.0, backend="varlen") is None  # then run by run


def test_older_versions_of_torch_are_told_what_they_lack() -> None:
    def of_211(query: Tensor, *, return_aux: Any, scale: Any, window_size: Any) -> Partial: ...

    lacking = ["enable_gqa", "seqused_k", "block_table", "num_splits"]
    assert missing_arguments(of_211) == lacking
    assert bool(missing_arguments(torch_varlen.varlen_attn)) == (torch.__version__ < "2.12")


def test_auto_never_takes_it() -> None:
    assert not VARLEN.pays(1, 8, 8)
