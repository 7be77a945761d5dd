"""What DCPMLAAttention sends, against its documented tables.

Letters: k TP neighbours and p PCP ranks in a DCP group of g = k*p, n own heads, T decode rows,
L and R the parts of a latent row, V the values' width, e bytes an element.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from mla_cases import COMBINES, Setup, build
from torch import Tensor

from cplayers.mesh import Topology

Records = list[tuple[str, str, int]]
DTYPES = [torch.float32, torch.bfloat16]
L, R, P, V, HIDDEN = 6, 4, 5, 3, 10
OWN = 3  # query heads per rank
PROMPTS = (("a", 23), ("b", 6), ("c", 9))
CHUNKS = (("a", 5), ("b", 4))
DECODE = (("a", 1), ("b", 3), ("c", 0))
T = 4  # rows of DECODE
PLAIN = [
    Topology(tp=2, dcp=2),
    Topology(tp=4, dcp=2),
    Topology(tp=4, dcp=4),
    Topology(tp=6, dcp=3),
    Topology(tp=8, dcp=8),
]
WITH_PCP = [
    Topology(pcp=3, dcp=3),
    Topology(tp=2, pcp=2, dcp=2),
    Topology(tp=2, pcp=2, dcp=4),
    Topology(tp=4, pcp=2, dcp=4),
    Topology(tp=2, pcp=4, dcp=8),
]


def setup_of(topology: Topology, dtype: torch.dtype = torch.float32, **options: Any) -> Setup:
    return Setup(
        topology,
        num_heads=OWN * topology.tp,
        kv_lora_rank=L,
        rope_dim=R,
        nope_dim=P,
        value_dim=V,
        hidden=HIDDEN,
        prefill="gather_kv",
        dtype=dtype,
        max_decode_tokens=3,
        **options,
    )


def traffic_of(setup: Setup, *steps: tuple[tuple[str, int], ...]) -> list[Records]:
    """Records of each step."""
    live = build(setup)
    records = []
    for requests in steps:
        plan = live.plan(requests)
        with live.mesh.traffic.capture() as log:
            live.forward(plan)
        live.cache.commit(plan)
        live.steps += 1
        records.append([tuple(record) for record in log])
    return records


def o_proj(topology: Topology, rows: int, e: int) -> Records:
    """The all-reduce after attention."""
    if topology.tp == 1:
        return []
    sent = -(-2 * (topology.tp - 1) * rows * HIDDEN * e // topology.tp)
    return [("tp", "all_reduce", sent)]


def query_gather(topology: Topology, e: int) -> Records:
    k = topology.dcp_tp
    if k == 1:
        return []
    axis = "dcp" if topology.pcp == 1 else "dcp_tp"
    return [(axis, "all_gather", (k - 1) * T * OWN * (L + R) * e)]


def combining(topology: Topology, combine: str, width: int, e: int) -> Records:
    g, n = topology.dcp, OWN
    heads = topology.dcp_tp * n
    if combine == "a2a":
        return [("dcp", "all_to_all", (g - 1) * T * n * (width * e + 4))]
    lse = ("dcp", "all_gather", (g - 1) * T * heads * 4)
    if combine == "ag_rs":
        return [lse, ("dcp", "reduce_scatter", (g - 1) * T * n * width * 4)]
    return [lse, ("dcp", "all_reduce", -(-2 * (g - 1) * T * heads * width * 4 // g))]


def largest_share(lengths: list[int], ranks: int, interleave: int) -> int:
    """Tokens on the first rank, which never holds fewer than another."""
    return sum(
        position // interleave % ranks == 0 for length in lengths for position in range(length)
    )


def pieces(setup: Setup, lengths: list[int]) -> Records:
    """All-gathers of whole workspaces, then of the rest."""
    g = setup.topology.dcp
    if g == 1:
        return []
    rows = largest_share(lengths, g, setup.interleave)
    width = max(1, setup.workspace_tokens // g)
    widths = [width] * (rows // width) + [rows % width] * (rows % width > 0)
    return [("dcp", "all_gather", (g - 1) * w * (L + R) * setup.dtype.itemsize) for w in widths]


def zigzag_shares(ranks: int, prompts: list[int]) -> list[int]:
    """Rows of each PCP rank: of each prompt, chunks r and 2p-1-r of 2p equally long ones."""
    counts = [0] * ranks
    for length in prompts:
        chunk = -(-length // (2 * ranks))
        for position in range(length):
            place = position // chunk
            counts[min(place, 2 * ranks - 1 - place)] += 1
    return counts


def new_latents(topology: Topology, new: list[int], e: int) -> Records:
    """The all-gather of a chunk's own latents, padded to the largest share."""
    p = topology.pcp
    if p == 1:
        return []
    return [("pcp", "all_gather", (p - 1) * max(zigzag_shares(p, new)) * (L + R) * e)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("topology", PLAIN + WITH_PCP, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("combine", COMBINES)
def test_decoding_over_resting_latents_sends_what_the_tables_say(
    ranks: Any, topology: Topology, dtype: torch.dtype, combine: str
) -> None:
    e, collectives = dtype.itemsize, {"a2a": 1, "ag_rs": 2, "ar": 2}[combine]
    expected = {
        "gather_q": query_gather(topology, e) + combining(topology, combine, L, e),
        "replicate_q": combining(topology, combine, V, e),
    }
    assert len(expected["gather_q"]) == collectives + (topology.dcp_tp > 1)
    assert len(expected["replicate_q"]) == collectives
    for decode, before in expected.items():
        setup = setup_of(topology, dtype, decode=decode, combine=combine)
        for _, sent in ranks(8).run(traffic_of, setup, PROMPTS, DECODE, n=topology.world_size):
            assert sent == before + o_proj(topology, T, e)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("topology", PLAIN + WITH_PCP, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("interleave", "workspace"), [(1, 1024), (1, 16), (3, 8), (16, 1)])
def test_decoding_over_gathered_latents_sends_the_context_once(
    ranks: Any, topology: Topology, dtype: torch.dtype, interleave: int, workspace: int
) -> None:
    setup = setup_of(
        topology, dtype, decode="gather_kv", interleave=interleave, workspace_tokens=workspace
    )
    expected = pieces(setup, [24, 9])  # this step's tokens included; c has none and takes no part
    assert len(expected) > 1 or workspace == 1024
    for _, sent in ranks(8).run(traffic_of, setup, PROMPTS, DECODE, n=topology.world_size):
        assert sent == expected + o_proj(topology, T, dtype.itemsize)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "topology", [*PLAIN, *WITH_PCP, Topology(pcp=5), Topology(tp=2, pcp=3)], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("interleave", "workspace"), [(1, 1024), (2, 16), (5, 7)])
def test_chunks_gather_new_latents_once_and_their_context_in_pieces(
    ranks: Any, topology: Topology, dtype: torch.dtype, interleave: int, workspace: int
) -> None:
    e, p, g = dtype.itemsize, topology.pcp, topology.dcp
    setup = setup_of(topology, dtype, interleave=interleave, workspace_tokens=workspace)
    context = pieces(setup, [23, 6])
    total = sum(sent for _, _, sent in context)
    if g > 1:
        # (N-1)/N of the context's bytes, and padding below one run per request and rank
        row = (L + R) * e
        exact = (g - 1) * 29 * row / g
        assert exact <= total < exact + (g - 1) * 2 * interleave * row
        assert total == (g - 1) * largest_share([23, 6], g, interleave) * row
    answers = ranks(8).run(traffic_of, setup, PROMPTS, CHUNKS, n=topology.world_size)
    for rank, (first, second) in enumerate(answers):
        at = topology.rank_in(rank, "pcp")
        new = [new for _, new in PROMPTS]
        assert first == [
            *new_latents(topology, new, e),
            *o_proj(topology, zigzag_shares(p, new)[at], e),
        ]
        new = [new for _, new in CHUNKS]
        rows = zigzag_shares(p, new)[at]
        assert second[-1:] == o_proj(topology, rows, e)[-1:] or topology.tp == 1
        assert sorted(second) == sorted(
            [*new_latents(topology, new, e), *context, *o_proj(topology, rows, e)]
        )


@pytest.mark.parametrize("topology", [Topology(tp=4, dcp=4), Topology(tp=2, pcp=2, dcp=4)], ids=str)
def test_a_mixed_step_sends_what_its_parts_send(ranks: Any, topology: Topology) -> None:
    """Decode rows, a chunk and a fresh prompt at once: one o_proj for all of them."""
    setup = setup_of(topology, interleave=2, workspace_tokens=8)
    mixed = (("b", 3), ("new", 4), ("a", 5), ("c", 1))
    for rank, (_, sent) in enumerate(
        ranks(8).run(traffic_of, setup, PROMPTS, mixed, n=topology.world_size)
    ):
        rows = T + zigzag_shares(topology.pcp, [4, 5])[topology.rank_in(rank, "pcp")]
        assert sorted(sent) == sorted(
            [
                *query_gather(topology, 4),
                *combining(topology, "a2a", L, 4),
                *new_latents(topology, [4, 5], 4),
                *pieces(setup, [23]),
                *o_proj(topology, rows, 4),
            ]
        )


# auto: what moves fewer bytes

AUTO = [
    (Topology(tp=4, dcp=4), torch.float32),
    (Topology(tp=4, dcp=2), torch.bfloat16),
    (Topology(pcp=3, dcp=3), torch.float32),
    (Topology(tp=2, pcp=2, dcp=4), torch.bfloat16),
    (Topology(tp=2, pcp=2, dcp=2), torch.float32),
]
GRID_CONTEXTS = (1, 3, 8, 16, 40, 77, 150)
GRID_ROWS = (1, 3, 9, 16)


def grid(setup: Setup) -> list[tuple[tuple[int, int], dict[str, Records], bool]]:
    """For each context and number of rows: what each way sends, and whether auto is one of them."""
    lives = {
        decode: build(replace(setup, decode=decode)) for decode in ("gather_q", "gather_kv", "auto")
    }
    results = []
    for context in GRID_CONTEXTS:
        first = (("a", context), ("b", max(1, context // 3)))
        for live in lives.values():
            live.step(first)
        for rows in GRID_ROWS:
            records: dict[str, Records] = {}
            outs: dict[str, Tensor] = {}
            for decode, live in lives.items():
                plan = live.plan((("a", rows), ("b", 1)))
                assert plan.num_decode == rows + 1
                with live.mesh.traffic.capture() as log:
                    outs[decode] = live.forward(plan)
                records[decode] = [tuple(record) for record in log]
            same = next(d for d in ("gather_q", "gather_kv") if records[d] == records["auto"])
            results.append(((context, rows), records, bool(outs["auto"].equal(outs[same]))))
        for live in lives.values():
            live.cache.free("a")
            live.cache.free("b")
    return results


@pytest.mark.sampled(3)
@pytest.mark.parametrize("combine", COMBINES)
@pytest.mark.parametrize(("topology", "dtype"), AUTO, ids=str)
def test_auto_never_moves_more_than_the_better_way(
    ranks: Any, topology: Topology, dtype: torch.dtype, combine: str
) -> None:
    setup = replace(
        setup_of(topology, dtype, combine=combine, interleave=2, workspace_tokens=64),
        max_decode_tokens=16,
    )
    answers = ranks(8).run(grid, setup, n=topology.world_size)
    chosen = set()
    for answer in answers:
        assert [records for _, records, _ in answer] == [records for _, records, _ in answers[0]]
        assert len(answer) == len(GRID_CONTEXTS) * len(GRID_ROWS)
        for place, records, same in answer:
            sent = {
                decode: sum(b for axis, _, b in log if axis != "tp")
                for decode, log in records.items()
            }
            assert sent["auto"] == min(sent["gather_q"], sent["gather_kv"]), place
            assert same, place
            if sent["gather_q"] != sent["gather_kv"]:
                chosen.add(min(("gather_q", "gather_kv"), key=lambda way: sent[way]))
    assert chosen == {"gather_q", "gather_kv"}


# Nothing to send


@pytest.mark.parametrize("decode", ["gather_q", "replicate_q", "gather_kv", "auto"])
def test_what_is_not_spread_sends_nothing(ranks: Any, decode: str) -> None:
    steps = (PROMPTS, CHUNKS, DECODE)
    for combine in COMBINES:
        one = setup_of(Topology(), decode=decode, combine=combine, workspace_tokens=4)
        assert ranks(8).run(traffic_of, one, *steps, n=1) == [[[], [], []]]
    tensor = setup_of(Topology(tp=4), decode=decode, workspace_tokens=4)
    for sent in ranks(8).run(traffic_of, tensor, *steps, n=4):
        assert sent == [o_proj(tensor.topology, rows, 4) for rows in (38, 9, T)]
    context = setup_of(Topology(pcp=3), decode=decode, workspace_tokens=4)
    for prompt, chunk, decoded in ranks(8).run(traffic_of, context, *steps, n=3):
        assert [record[:2] for record in prompt] == [("pcp", "all_gather")]
        assert [record[:2] for record in chunk] == [("pcp", "all_gather")]
        assert decoded == []
