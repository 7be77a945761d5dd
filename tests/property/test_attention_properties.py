"""DCPGQAAttention equals dense attention, for drawn layers, ranks, caches and batches."""

from __future__ import annotations

from typing import Any

from attention_cases import Script, Setup, check_script
from hypothesis import example, given
from hypothesis import strategies as st

from cplayers.errors import ConfigError
from cplayers.mesh import Topology, validate

TOPOLOGIES = [
    Topology(tp=tp, pcp=pcp, dcp=dcp)
    for tp in range(1, 10)
    for pcp in range(1, 10 // tp + 1)
    if tp * pcp <= 9
    for dcp in sorted({1, *(pcp * k for k in range(1, tp + 1) if tp % k == 0)})
]
HEADS = [(kv * group, kv) for kv in range(1, 9) for group in (1, 2, 3, 4, 6, 8) if kv * group <= 24]


def _legal(topology: Topology, heads: tuple[int, int], tpa: bool) -> bool:
    try:
        validate(
            topology,
            num_heads=heads[0],
            num_kv_heads=heads[1],
            block_size=1,
            interleave_size=1,
            replicate_q=tpa,
        )
    except ConfigError:
        return False
    return True


PLACES = {
    (topology, q_proj): legal
    for topology in TOPOLOGIES
    for q_proj in ("gather", "tpa")
    if (legal := [h for h in HEADS if _legal(topology, h, q_proj == "tpa")])
}


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    topology, q_proj = draw(st.sampled_from(list(PLACES)))
    heads, kv_heads = draw(st.sampled_from(PLACES[topology, q_proj]))
    return Setup(
        topology=topology,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 6, 10, 14, 16, 16])),
        hidden=draw(st.integers(5, 17)),
        q_proj=q_proj,
        combine=draw(st.sampled_from(["a2a", "ag_rs", "ar"])),
        overlap=draw(st.booleans()),
        interleave=draw(st.integers(1, 40)),
        block=draw(st.integers(1, 16)),
        bias=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        window=draw(st.none() | st.integers(1, 64)),
        softcap=draw(st.sampled_from([None, 3.0])),
        sinks=draw(st.booleans()),
        prefill=draw(st.sampled_from(["auto", "gather_q", "gather_kv", "ring"])),
        workspace_tokens=draw(st.sampled_from([1, 7, 32, 16384])),
        max_decode_tokens=draw(st.sampled_from([0, 1, 4, 16])),
        layer_idx=draw(st.integers(0, 1)),
        seed=draw(st.integers(0, 999)),
    )


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    """Sequences that join, decode, fork, are cut and leave; 2 to 6 steps."""
    lengths: dict[str, int] = {}
    names = iter("abcdefghijklmnopqrstuvwxyz")
    script: list[tuple[Any, ...]] = []
    for step in range(draw(st.integers(2, 6))):
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
            (seq, draw(st.sampled_from([0, 1, 1, 2, 3, 4, 11])))
            for seq in lengths
            if draw(st.integers(0, 3))
        ]
        for _ in range(draw(st.integers(int(step == 0), 2))):
            requests.append((next(names), draw(st.integers(1, 40))))
        requests = draw(st.permutations(requests))
        for seq, new in requests:
            lengths[seq] = lengths.get(seq, 0) + new
        script.append(("step", tuple(requests)))
    return tuple(script)


def forgetting(script: Script, window: int) -> Script:
    """The same without cuts, and with all that is out of the window given back after each step."""
    lengths: dict[str, int] = {}
    result: list[tuple[Any, ...]] = []
    for name, *args in script:
        if name == "truncate":
            continue
        result.append((name, *args))
        if name == "fork":
            lengths[args[1]] = lengths[args[0]]
        elif name == "free":
            del lengths[args[0]]
        else:
            for seq, new in args[0]:
                lengths[seq] = lengths.get(seq, 0) + new
                result.append(("forget", seq, lengths[seq] + 1 - window))
    return tuple(result)


@given(setup=setups(), script=scripts())
@example(  # a window of 5 over shards of 4 ranks, what it leaves behind given back
    setup=Setup(Topology(tp=2, pcp=2, dcp=4), 4, 1, window=5, sinks=True, interleave=3, block=2),
    script=(
        ("step", (("a", 30), ("b", 2))),
        ("step", (("b", 17), ("a", 1))),
        ("fork", "b", "c"),
        ("step", (("c", 20), ("b", 1), ("a", 4))),
    ),
)
@example(  # own heads of a TPA rank read KV heads 0, 1, 1: neither a run of them nor all
    setup=Setup(Topology(tp=4, dcp=4), 12, 3, q_proj="tpa"),
    script=(("step", (("a", 9),)), ("step", (("a", 2),))),
)
@example(  # a fork of a sequence whose last block is half full, then both write into it
    setup=Setup(Topology(tp=2, pcp=2, dcp=4), 4, 1, interleave=3, block=2),
    script=(
        ("step", (("a", 13),)),
        ("fork", "a", "b"),
        ("step", (("b", 3), ("a", 1))),
        ("truncate", "a", 5),
        ("step", (("a", 4), ("c", 6), ("b", 0))),
    ),
)
@example(  # PCP ranks compute the keys of "a" beside shares of other prompts, and keep a copy each
    setup=Setup(Topology(pcp=3), 4, 2, head_dim=8, hidden=16),
    script=(
        ("step", (("a", 2),)),
        ("step", (("a", 3), ("b", 1))),
        ("step", (("a", 3), ("c", 2))),
        ("step", (("a", 1),)),
    ),
)
def test_attention_over_ranks_is_dense_attention(ranks: Any, setup: Setup, script: Script) -> None:
    if setup.window is not None and setup.seed % 2 == 0:
        script = forgetting(script, setup.window)
    check_script(ranks, setup, script)


def test_the_draws_cover_every_number_of_ranks() -> None:
    for q_proj in ("gather", "tpa"):
        sizes = {topology.world_size for topology, mode in PLACES if mode == q_proj}
        assert sizes == set(range(1, 10))
    assert any(t.pcp > 1 and t.dcp > t.pcp for t, _ in PLACES)
