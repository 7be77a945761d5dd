"""What the layers send, against the tables in combine.py, gqa.py and prefill.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention_cases import Setup, build
from hypothesis import given
from hypothesis import strategies as st

from cplayers.cache import GQASpec, InterleavedLayout, PagedKVCache, StepPlan
from cplayers.mesh import Topology

Records = list[tuple[str, str, int]]
DTYPES = [torch.float32, torch.bfloat16]
PROMPTS = (("a", 11), ("b", 4))
DECODE = (("a", 1), ("b", 3))
T = 4  # rows of DECODE
H, HIDDEN = 6, 10
OWN = 2  # query heads per rank
PLAIN = [
    Topology(tp=2, dcp=2),
    Topology(tp=4, dcp=2),
    Topology(tp=4, dcp=4),
    Topology(tp=6, dcp=3),
    Topology(tp=8, dcp=8),
]
WITH_PCP = [
    Topology(tp=2, pcp=2, dcp=2),
    Topology(tp=2, pcp=2, dcp=4),
    Topology(tp=4, pcp=2, dcp=4),
    Topology(tp=2, pcp=4, dcp=8),
    Topology(pcp=3, dcp=3),
]


def traffic_of(setup: Setup) -> tuple[Records, Records]:
    """Records of a step of prompts, and of one that decodes."""
    live = build(setup)
    steps = []
    for requests in (PROMPTS, DECODE):
        plan = live.plan(requests)
        with live.mesh.traffic.capture() as log:
            live.forward(plan)
        live.cache.commit(plan)
        live.steps += 1
        steps.append([tuple(record) for record in log])
    return steps[0], steps[1]


def setup_of(topology: Topology, q_proj: str, combine: str, dtype: torch.dtype) -> Setup:
    return Setup(
        topology,
        num_heads=OWN * topology.tp,
        num_kv_heads=1,
        head_dim=H,
        hidden=HIDDEN,
        q_proj=q_proj,
        combine=combine,
        dtype=dtype,
    )


def o_proj(topology: Topology, rows: int, e: int) -> Records:
    """The all-reduce after attention."""
    if topology.tp == 1:
        return []
    sent = -(-2 * (topology.tp - 1) * rows * HIDDEN * e // topology.tp)
    return [("tp", "all_reduce", sent)]


def query_gather(topology: Topology, q_proj: str, e: int) -> Records:
    """First term of gqa.py's table: (k-1)/k * T*kn*H*e, over the TP neighbours of a group."""
    k = topology.dcp_tp
    if q_proj == "tpa" or k == 1:
        return []
    axis = "dcp" if topology.pcp == 1 else "dcp_tp"
    return [(axis, "all_gather", (k - 1) * T * k * OWN * H * e // k)]


def combining(topology: Topology, combine: str, e: int) -> Records:
    """combine.py's table: k TP neighbours, p PCP ranks, N = k*n heads of the group."""
    g, n = topology.dcp, OWN
    heads = topology.dcp_tp * n
    if combine == "a2a":
        return [("dcp", "all_to_all", (g - 1) * T * n * (H * e + 4))]
    lse = ("dcp", "all_gather", (g - 1) * T * heads * 4)
    if combine == "ag_rs":
        return [lse, ("dcp", "reduce_scatter", (g - 1) * T * n * H * 4)]
    return [lse, ("dcp", "all_reduce", -(-2 * (g - 1) * T * heads * H * 4 // g))]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("topology", PLAIN + WITH_PCP, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("q_proj", "combine", "collectives"),
    [("gather", "ag_rs", 3), ("gather", "a2a", 2), ("gather", "ar", 3), ("tpa", "a2a", 1)],
)
def test_a_decode_step_sends_what_the_tables_say(
    ranks: Any,
    topology: Topology,
    q_proj: str,
    combine: str,
    collectives: int,
    dtype: torch.dtype,
) -> None:
    setup, e = setup_of(topology, q_proj, combine, dtype), dtype.itemsize
    before = query_gather(topology, q_proj, e) + combining(topology, combine, e)
    assert len(before) == collectives - (q_proj == "gather" and topology.dcp_tp == 1)
    for _, decode in ranks(9).run(traffic_of, setup, n=topology.world_size):
        assert decode == before + o_proj(topology, T, e)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("topology", PLAIN, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_pcp_both_terms_have_the_form_of_a_ring(
    ranks: Any, topology: Topology, dtype: torch.dtype
) -> None:
    """(g-1)/g of the group's queries, and of its packed outputs."""
    g, e = topology.dcp, dtype.itemsize
    heads = g * OWN
    setup = setup_of(topology, "gather", "a2a", dtype)
    for _, decode in ranks(9).run(traffic_of, setup, n=topology.world_size):
        assert [record for record in decode if record[0] != "tp"] == [
            ("dcp", "all_gather", (g - 1) * T * heads * H * e // g),
            ("dcp", "all_to_all", (g - 1) * T * heads * (H * e + 4) // g),
        ]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("topology", [*WITH_PCP, Topology(pcp=5), Topology(tp=2, pcp=3)], ids=str)
def test_prompts_gather_keys_and_values_once(
    ranks: Any, topology: Topology, dtype: torch.dtype
) -> None:
    p, e = topology.pcp, dtype.itemsize
    width = max(shares(p, [new for _, new in PROMPTS]))
    assert width <= sum(2 * -(-new // (2 * p)) for _, new in PROMPTS)
    kv_heads = 1
    answers = ranks(9).run(
        traffic_of, setup_of(topology, "gather", "a2a", dtype), n=topology.world_size
    )
    rows = shares(p, [new for _, new in PROMPTS])
    for rank, (prompt, _) in enumerate(answers):
        gather = [("pcp", "all_gather", (p - 1) * width * kv_heads * (H + H) * e)]
        own = rows[topology.rank_in(rank, "pcp")]
        assert prompt == gather + o_proj(topology, own, e)


@pytest.mark.parametrize("q_proj", ["gather", "tpa"])
def test_degree_1_sends_nothing(ranks: Any, q_proj: str) -> None:
    for combine in ("a2a", "ag_rs", "ar"):
        setup = setup_of(Topology(), q_proj, combine, torch.float32)
        assert ranks(9).run(traffic_of, setup, n=1) == [([], [])]


def test_tp_alone_sends_only_after_attention(ranks: Any) -> None:
    topology = Topology(tp=4)
    for prompt, decode in ranks(9).run(
        traffic_of, setup_of(topology, "gather", "a2a", torch.float32), n=4
    ):
        assert (prompt, decode) == (o_proj(topology, 15, 4), o_proj(topology, T, 4))


def test_decoding_over_replicated_keys_sends_nothing(ranks: Any) -> None:
    setup = setup_of(Topology(pcp=3), "gather", "a2a", torch.float32)
    for prompt, decode in ranks(9).run(traffic_of, setup, n=3):
        assert [record[:2] for record in prompt] == [("pcp", "all_gather")]
        assert decode == []


# Padding of the gathered keys: plans alone, no ranks.


def shares(ranks: int, prompts: list[int]) -> list[int]:
    """Rows of each PCP rank: of each prompt, chunks r and 2p-1-r of 2p equally long ones."""
    counts = [0] * ranks
    for length in prompts:
        chunk = -(-length // (2 * ranks))
        for position in range(length):
            place = position // chunk
            counts[min(place, 2 * ranks - 1 - place)] += 1
    return counts


def plan_of(rank: int, size: int, prompts: list[int]) -> StepPlan:
    layout = InterleavedLayout(size, 16, 16)
    blocks = sum(-(-n // 16) + 1 for n in prompts)
    cache = PagedKVCache(GQASpec(1, 2), layout, 1, blocks, rank, pcp_rank=rank, pcp_size=size)
    for index in range(len(prompts)):
        cache.add(index)
    return cache.plan(list(enumerate(prompts)))


@given(size=st.integers(2, 8), prompts=st.lists(st.integers(1, 300), min_size=1, max_size=4))
def test_the_largest_share_is_padded_to(size: int, prompts: list[int]) -> None:
    expected = shares(size, prompts)
    for rank in range(size):
        plan = plan_of(rank, size, prompts)
        assert plan.prefill is not None
        assert list(plan.prefill.counts) == expected
        assert plan.prefill.width == max(expected)
        assert plan.num_rows == expected[rank]
    assert max(expected) <= sum(2 * -(-length // (2 * size)) for length in prompts)
    if all(length % (2 * size) == 0 for length in prompts):
        assert set(expected) == {sum(prompts) // size}


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("length", range(1990, 2011))
def test_2000_tokens_are_padded_by_less_than_2_percent(size: int, length: int) -> None:
    plan = plan_of(0, size, [length])
    assert plan.prefill is not None
    padding = plan.prefill.width * size - length
    assert 0 <= padding < 2 * size
    assert padding <= 0.008 * length
    assert padding == 0 or length % (2 * size)
