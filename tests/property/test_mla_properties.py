"""DCPMLAAttention equals dense attention, for drawn layers, ranks, caches and batches.

So does DCPGQAAttention where prompts go on in chunks, on a few layouts that are easy to get wrong.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import attention_cases as plain
import pytest
from attention_cases import Script
from hypothesis import example, given
from hypothesis import strategies as st
from mla_cases import COMBINES, DECODES, PREFILLS, Setup, check_scripts, compare, step

from cplayers.mesh import Topology

TOPOLOGIES = [
    Topology(tp=tp, pcp=pcp, dcp=dcp)
    for tp in range(1, 9)
    for pcp in range(1, 8 // tp + 1)
    for dcp in sorted({1, *(pcp * k for k in range(1, tp + 1) if tp % k == 0)})
]


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    topology = draw(st.sampled_from(TOPOLOGIES))
    most = max(1, 12 // topology.tp)
    return Setup(
        topology=topology,
        num_heads=topology.tp * draw(st.integers(1, min(5, most))),
        q_lora_rank=draw(st.none() | st.integers(1, 9)),
        kv_lora_rank=draw(st.integers(1, 12) | st.just(16)),
        nope_dim=draw(st.integers(1, 9)),
        rope_dim=draw(st.sampled_from([2, 6, 16])),
        overlap=draw(st.booleans()),
        value_dim=draw(st.integers(1, 9)),
        hidden=draw(st.integers(5, 16)),
        interleave=draw(st.integers(1, 5) | st.integers(1, 40)),
        block=draw(st.integers(1, 16)),
        prefill=draw(st.sampled_from(PREFILLS)),
        workspace_tokens=draw(st.integers(1, 64) | st.just(16384)),
        max_decode_tokens=draw(st.integers(0, 4) | st.just(16)),
        rope_interleave=draw(st.booleans()),
        bias=draw(st.booleans()),
        softcap=draw(st.sampled_from([None, 3.0])),
        yarn=draw(st.sampled_from([None, (4.0, 0.7)])),
        layer_idx=draw(st.integers(0, 1)),
        seed=draw(st.integers(0, 999)),
    )


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Sequences that join, go on in chunks, decode, fork, are cut and leave; 2 to 5 steps."""
    lengths: dict[str, int] = {}
    names = iter("abcdefghijklmnopqrstuvwxyz")
    script: list[tuple[Any, ...]] = []
    for number in range(draw(st.integers(2, 5))):
        if lengths:
            change = draw(st.sampled_from(["none", "fork", "truncate", "free"]))
            seq = draw(st.sampled_from(sorted(lengths)))
            if change == "fork":
                new = next(names)
                lengths[new] = lengths[seq]
                script.append(("fork", seq, new))
            elif change == "truncate":
                lengths[seq] = draw(st.integers(0, lengths[seq]))
                script.append(("truncate", seq, lengths[seq]))
            elif change == "free":
                del lengths[seq]
                script.append(("free", seq))
        requests = [
            (seq, draw(st.sampled_from([0, 1, 2, 5, 9, 20])))
            for seq in lengths
            if draw(st.integers(0, 3))
        ]
        for _ in range(draw(st.integers(int(number == 0), 2))):
            requests.append((next(names), draw(st.integers(1, 40))))
        requests = draw(st.permutations(requests))
        for seq, new in requests:
            lengths[seq] = lengths.get(seq, 0) + new
        script.append(step(*requests))
    return tuple(script)


@given(setup=setups(), script=scripts(), turn=st.integers(0, 2))
@example(  # runs longer than a piece: positions of a piece are not one range
    setup=Setup(
        Topology(tp=4, dcp=4), 12, interleave=16, workspace_tokens=9, max_decode_tokens=0, seed=1
    ),
    script=(step(("a", 40), ("b", 3)), step(("b", 5), ("a", 2)), step(("a", 1), ("b", 1))),
    turn=0,
)
@example(  # a fork of a sequence whose last block is half full, then chunks of both
    setup=Setup(
        Topology(tp=2, pcp=2, dcp=4),
        6,
        interleave=3,
        block=2,
        workspace_tokens=8,
        max_decode_tokens=2,
    ),
    script=(
        step(("a", 13)),
        ("fork", "a", "b"),
        step(("b", 3), ("a", 5)),
        ("truncate", "a", 5),
        step(("a", 4), ("c", 6), ("b", 0)),
        step(("c", 2), ("a", 1), ("b", 1)),
    ),
    turn=1,
)
@example(  # a group that spans both axes; decode rows beside chunks with context
    setup=Setup(
        Topology(tp=4, pcp=2, dcp=4),
        12,
        5,
        max_decode_tokens=1,
        workspace_tokens=5,
    ),
    script=(step(("a", 7), ("b", 11)), step(("a", 1), ("b", 6)), step(("b", 1), ("a", 3))),
    turn=2,
)
def test_latent_attention_over_ranks_is_dense_attention(
    ranks: Any, setup: Setup, script: Script, turn: int
) -> None:
    """Every way to decode, the ways to combine taking turns."""
    check_scripts(
        ranks,
        tuple(
            replace(setup, decode=decode, combine=COMBINES[(i + turn) % len(COMBINES)])
            for i, decode in enumerate(DECODES)
        ),
        script,
    )


CHUNKED = (step(("a", 13), ("b", 4)), step(("b", 5), ("c", 6), ("a", 1)), step(("a", 7), ("c", 2)))


@pytest.mark.parametrize(
    "setup",
    [
        # own heads of a TPA rank read KV heads 0, 1, 1 of gathered context
        plain.Setup(Topology(tp=4, dcp=4), 12, 3, q_proj="tpa", max_decode_tokens=1),
        # groups that share a KV head with none of their neighbours
        plain.Setup(Topology(tp=4, dcp=2), 8, 2, interleave=3, combine="ag_rs"),
        # shares of chunks, whose context is on ranks of both axes
        plain.Setup(Topology(tp=2, pcp=2, dcp=4), 4, 1, interleave=2, softcap=3.0),
        # every PCP rank has all of the context
        plain.Setup(Topology(pcp=3), 4, 2, interleave=2, max_decode_tokens=0),
    ],
    ids=lambda setup: str(setup.topology),
)
@pytest.mark.parametrize("prefill", PREFILLS)
def test_grouped_query_attention_of_chunks_is_dense_attention(
    ranks: Any, setup: plain.Setup, prefill: str
) -> None:
    most = min(setup.max_decode_tokens, 2)
    setup = replace(setup, prefill=prefill, workspace_tokens=6, max_decode_tokens=most)
    answers = ranks(8).run(plain.run_script, setup, CHUNKED, n=setup.topology.world_size)
    compare(answers, plain.Dense(setup).run(CHUNKED), setup)


def test_the_draws_cover_every_number_of_ranks() -> None:
    assert {topology.world_size for topology in TOPOLOGIES} == set(range(1, 9))
    assert any(t.pcp > 1 and t.dcp > t.pcp for t in TOPOLOGIES)
