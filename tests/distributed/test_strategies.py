"""What each prefill strategy sends, what ``auto`` takes, and that the plan's numbers say so.

Letters: k TP neighbours and p PCP ranks in a DCP group of g = k*p; n own heads; W elements stored
per token, D of a query, V of a result, e bytes each.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import attention_cases
import mla_cases
import pytest
import torch

from cplayers.mesh import Topology

Records = list[tuple[str, str, int]]
STRATEGIES = ("gather_q", "gather_kv", "ring")
OWN, HIDDEN, INTERLEAVE, WORKSPACE = 2, 10, 2, 16
CONTEXT, NEW = (23, 6), (9, 7)
TOPOLOGIES = [
    Topology(),
    Topology(tp=4),
    Topology(pcp=3),
    Topology(tp=4, dcp=2),
    Topology(tp=6, dcp=6),
    Topology(pcp=3, dcp=3),
    Topology(tp=2, pcp=2, dcp=2),
    Topology(tp=2, pcp=2, dcp=4),
    Topology(tp=4, pcp=2, dcp=4),
    Topology(tp=2, pcp=4, dcp=8),
]


class Moves(NamedTuple):
    """What a layer moves per token: elements stored, of a query, of a result."""

    stored: int
    query: int
    result: int
    replicated: bool = False


GQA = Moves(2 * 6, 6, 6)  # one KV head of 6 dimensions
GQA_TPA = GQA._replace(replicated=True)
MLA = Moves(6 + 4, 6 + 4, 6)
MLA_REPLICATED = Moves(6 + 4, 6 + 4, 3, True)  # values of 3 dimensions leave the latent before


def gqa(topology: Topology, prefill: str, combine: str, replicated: bool, **options: Any) -> Any:
    return attention_cases.Setup(
        topology,
        num_heads=OWN * topology.tp,
        num_kv_heads=1,
        head_dim=6,
        hidden=HIDDEN,
        q_proj="tpa" if replicated else "gather",
        combine=combine,
        interleave=INTERLEAVE,
        prefill=prefill,
        workspace_tokens=WORKSPACE,
        max_decode_tokens=0,
        **options,
    )


def mla(topology: Topology, prefill: str, combine: str, replicated: bool, **options: Any) -> Any:
    return mla_cases.Setup(
        topology,
        num_heads=OWN * topology.tp,
        kv_lora_rank=6,
        rope_dim=4,
        nope_dim=5,
        value_dim=3,
        hidden=HIDDEN,
        decode="replicate_q" if replicated else "gather_q",
        combine=combine,
        interleave=INTERLEAVE,
        prefill=prefill,
        workspace_tokens=WORKSPACE,
        max_decode_tokens=0,
        **options,
    )


LAYERS = [(gqa, GQA), (gqa, GQA_TPA), (mla, MLA), (mla, MLA_REPLICATED)]


def build(setup: Any) -> Any:
    module = mla_cases if isinstance(setup, mla_cases.Setup) else attention_cases
    return module.build(setup)


def sent(setup: Any, grid: tuple[tuple[tuple[int, int], tuple[int, int]], ...]) -> list[Any]:
    """For contexts and new tokens of two sequences: records of the chunk step, and `explain`."""
    live, results = build(setup), []
    for context, new in grid:
        if sum(context):
            live.step(tuple(zip("ab", context, strict=True)))
        plan = live.plan(tuple(zip("ab", new, strict=True)))
        with live.mesh.traffic.capture() as log:
            live.forward(plan)
        results.append(([tuple(r) for r in log if r.axis != "tp"], live.layer.explain(plan)))
        for seq in "ab":
            live.cache.free(seq)
    return results


def shares(ranks: int, new: tuple[int, ...]) -> list[list[int]]:
    """For each PCP rank its packed tokens: chunks r and 2p-1-r of 2p equal ones, per prompt."""
    pieces: list[list[int]] = [[] for _ in range(ranks)]
    start = 0
    for length in new:
        chunk = max(1, -(-length // (2 * ranks)))
        for token in range(length):
            place = token // chunk
            pieces[min(place, 2 * ranks - 1 - place)].append(start + token)
        start += length
    return pieces


def first_share(lengths: tuple[int, ...], ranks: int) -> int:
    return sum(p // INTERLEAVE % ranks == 0 for length in lengths for p in range(length))


def exchanged(topology: Topology, context: tuple[int, ...], new: tuple[int, ...]) -> int:
    """Most tokens of one PCP rank's share that one member of a DCP group owns."""
    positions = [c + i for c, n in zip(context, new, strict=True) for i in range(n)]
    most = 0
    for piece in shares(topology.pcp, new):
        owners = [positions[token] // INTERLEAVE % topology.dcp for token in piece]
        most = max([most, *(owners.count(rank) for rank in range(topology.dcp))])
    return most


def combining(topology: Topology, how: str, rows: int, own_rows: int, wide: int) -> Records:
    g, heads, e = topology.dcp, topology.dcp_tp * OWN, 4
    if how == "a2a":
        return [("dcp", "all_to_all", (g - 1) * own_rows * OWN * (wide * e + 4))]
    lse = ("dcp", "all_gather", (g - 1) * rows * heads * 4)
    if how == "ag_rs":
        return [lse, ("dcp", "reduce_scatter", (g - 1) * own_rows * OWN * wide * 4)]
    return [lse, ("dcp", "all_reduce", -(-2 * (g - 1) * rows * heads * wide * 4 // g))]


def visiting(
    topology: Topology, moves: Moves, how: str, context: tuple[int, ...], new: tuple[int, ...]
) -> Records:
    """gather_q, where dcp is above 1."""
    g, k, p, e, rows = topology.dcp, topology.dcp_tp, topology.pcp, 4, sum(new)
    if p == 1:
        gathered = (k - 1) * rows * OWN * moves.query * e
        queries = [] if moves.replicated else [("dcp", "all_gather", gathered)]
        return [*queries, *combining(topology, how, rows, rows, moves.result)]
    width = max(map(len, shares(p, new)))
    queries = [("dcp", "all_gather", (g - 1) * width * OWN * moves.query * e)]
    if moves.replicated:
        queries = [("pcp", "all_gather", (p - 1) * width * k * OWN * moves.query * e)]
    keys = (p - 1) * exchanged(topology, context, new) * moves.stored * e
    return [
        *queries,  # on their way first, before the keys are projected
        ("pcp", "all_to_all", keys),
        *combining(topology, how, rows, width, moves.result),
    ]


def fetching(
    topology: Topology, moves: Moves, context: tuple[int, ...], new: tuple[int, ...], ring: bool
) -> Records:
    g, p, row = topology.dcp, topology.pcp, moves.stored * 4
    width = max(map(len, shares(p, new)))
    left, most = first_share(context, g), max(1, WORKSPACE // (2 if ring else g))
    pieces = [most] * (left // most) + [left % most] * (left % most > 0)
    if ring:
        new_hops = [("pcp", "shift", width * row)] * (p - 1)
        return new_hops + [("dcp", "shift", w * row) for w in pieces for _ in range(g - 1)]
    gathers = [("dcp", "all_gather", (g - 1) * w * row) for w in pieces] if g > 1 else []
    return [("pcp", "all_gather", (p - 1) * width * row)] * (p > 1) + gathers


@pytest.mark.sampled(2)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_sends_what_its_table_says(
    ranks: Any, topology: Topology, strategy: str
) -> None:
    for index, (make, moves) in enumerate(LAYERS):
        how = ("a2a", "ag_rs", "ar")[(index + len(str(topology))) % 3]
        setup = make(topology, strategy, how, moves.replicated)
        grid = ((CONTEXT, NEW), ((0, 0), NEW))
        for answer in ranks(8).run(sent, setup, grid, n=topology.world_size):
            for (context, new), (records, explained) in zip(grid, answer, strict=True):
                visits = strategy == "gather_q" and topology.dcp > 1
                if topology.pcp == 1 and not sum(context):
                    visits = False  # fresh prompts that nobody shares: nothing need travel
                expected = (
                    visiting(topology, moves, how, context, new)
                    if visits
                    else fetching(topology, moves, context, new, strategy == "ring")
                )
                assert records == expected, (moves, context)
                ran = "ring" if strategy == "ring" else "gather_q" if visits else "gather_kv"
                assert explained.startswith(f"{ran}: {sum(new)} new tokens over {sum(context)}")


GRID = tuple(
    ((context, context // 3), (new, 1 + new // 4))
    for context in (0, 3, 8, 24, 90, 240)
    for new in (1, 4, 17, 60)
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("topology", [t for t in TOPOLOGIES if t.dcp > 1], ids=str)
def test_auto_takes_what_sends_fewest_bytes(ranks: Any, topology: Topology) -> None:
    for index, (make, moves) in enumerate(LAYERS):
        how = ("a2a", "ag_rs", "ar")[(index + topology.dcp) % 3]
        taken = set()
        setup = make(topology, "auto", how, moves.replicated)
        answers = ranks(8).run(sent, setup, GRID, n=topology.world_size)
        assert all(answer == answers[0] for answer in answers)
        for (context, new), (records, explained) in zip(GRID, answers[0], strict=True):
            ways = {
                "gather_q": visiting(topology, moves, how, context, new),
                "gather_kv": fetching(topology, moves, context, new, ring=False),
            }
            costs = {way: sum(b for *_, b in log) for way, log in ways.items()}
            assert sum(b for *_, b in records) == min(costs.values()), (context, new)
            ran = explained.split(":")[0]
            assert records == ways[ran]
            taken.add(ran)
            if topology.pcp > 1 or sum(context):
                for way, cost in costs.items():
                    assert f"{way:11} {cost:>14,} bytes" in explained
                assert "fewest bytes" in explained
        assert taken == {"gather_q", "gather_kv"}, (topology, moves)


@pytest.mark.parametrize("topology", [Topology(tp=4, dcp=2), Topology(pcp=2, dcp=2)], ids=str)
def test_auto_counts_only_what_the_window_reaches(ranks: Any, topology: Topology) -> None:
    """40 new tokens over 2,000 cached ones, of which 15 are in a window of 16."""
    grid = (((2000, 0), (40, 1)),)
    setup = gqa(topology, "auto", "a2a", False, window=16)
    for (records, explained), *_ in ranks(8).run(sent, setup, grid, n=topology.world_size):
        assert explained.startswith("gather_kv: 41 new tokens over 2000 cached ones; fewest bytes")
        cost = sum(b for *_, b in records)
        assert f"{'gather_kv':11} {cost:>14,} bytes" in explained
        assert cost < 64 * GQA.stored * 4 * topology.dcp


def test_explain_says_why_queries_stay(ranks: Any) -> None:
    setup = gqa(Topology(pcp=3), "gather_q", "a2a", False)
    (records, explained), *_ = ranks(8).run(sent, setup, ((CONTEXT, NEW),), n=3)[0]
    assert [r[:2] for r in records] == [("pcp", "all_gather")]
    assert explained == (
        "gather_kv: 16 new tokens over 29 cached ones; with dcp=1 every rank has all cached keys, "
        "so queries stay"
    )


def explained(setup: Any) -> tuple[str, str, str]:
    """What a plan says before and after a step of decode rows and chunks, and the layer's share."""
    live = build(setup)
    live.step((("a", 40), ("b", 3)))
    plan = live.plan((("a", 1), ("b", 5), ("c", 2)))
    before = plan.explain()
    live.forward(plan)
    return before, plan.explain(), live.layer.explain(plan)


def test_a_plan_explains_what_its_layers_chose(ranks: Any) -> None:
    setup = replace(
        mla(Topology(tp=2, dcp=2), "auto", "a2a", False), decode="auto", max_decode_tokens=1
    )
    head = "8 new tokens: 1 requests decode with 1 rows, 2 bring prompts or chunks of them"
    row, queries, keys = 4 * 10, 2 * 10 * 4, 6 * 4 + 4  # bytes of a token, of own heads' queries
    for before, after, layer in ranks(8).run(explained, setup, n=2):
        assert before == head
        decode = [
            "gather_q: 1 decode rows; fewest bytes",
            f"  gather_q    {queries + 2 * keys:>14,} bytes a rank and layer",
            f"  gather_kv   {21 * row:>14,} bytes a rank and layer",
        ]
        chunk = [
            "gather_kv: 7 new tokens over 3 cached ones; fewest bytes",
            f"  gather_q    {7 * (queries + 2 * keys):>14,} bytes a rank and layer",
            f"  gather_kv   {2 * row:>14,} bytes a rank and layer",
            f"  ring        {2 * row:>14,} bytes a rank and layer",
        ]
        assert after.splitlines() == [head, *decode, *chunk]
        assert layer.splitlines() == chunk


def held(setup: Any, context: int, new: int) -> tuple[int, int]:
    """Rows of the largest tensor that holds cached keys of other ranks, and of any at all."""
    live = build(setup)
    live.step((("a", context),))
    plan = live.plan((("a", new),))
    assert plan.prefill is not None
    sizes = []
    original = torch.Tensor.new_zeros

    def watched(self: torch.Tensor, *shape: Any, **options: Any) -> torch.Tensor:
        made = original(self, *shape, **options)
        sizes.append(made.numel())
        return made

    torch.Tensor.new_zeros = watched  # type: ignore[method-assign]
    try:
        live.forward(plan)
    finally:
        torch.Tensor.new_zeros = original  # type: ignore[method-assign]
    pieces = plan.prefill.context.pieces(setup.workspace_tokens)
    return max(piece.width for piece in pieces) * live.mesh.size("dcp"), max(sizes)


@pytest.mark.parametrize("context", [50, 400])
def test_the_workspace_is_bounded_whatever_the_context(ranks: Any, context: int) -> None:
    setup = mla(Topology(pcp=2, dcp=2), "gather_kv", "a2a", False, num_blocks=400)
    for rows, largest in ranks(8).run(held, setup, context, 6, n=2):
        assert rows == WORKSPACE
        assert largest <= WORKSPACE // 2 * MLA.stored
