"""DCPMLAAttention on named cases, and what it does when a step goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from attention_cases import Script, check_close
from mla_cases import (
    COMBINES,
    DECODES,
    EPS,
    PREFILLS,
    Dense,
    Live,
    Setup,
    build,
    check_script,
    check_scripts,
    exact,
    modules,
    options,
    play,
    prompts,
    run_scripts,
    step,
)
from torch import Tensor, nn

from cplayers.attention import DCPMLAAttention, PCPPrefillAttention, TPAQProj
from cplayers.cache import MLASpec
from cplayers.errors import ConfigError, StateError
from cplayers.mesh import CPMesh, Topology

TOPOLOGIES = [
    Topology(),
    Topology(tp=3),
    Topology(pcp=2),
    Topology(tp=2, pcp=3),
    Topology(tp=2, dcp=2),
    Topology(tp=2, dcp=2, dp=2),
    Topology(tp=3, dcp=3),
    Topology(tp=4, dcp=2),
    Topology(tp=4, dcp=4),
    Topology(tp=5, dcp=5),
    Topology(tp=6, dcp=2),
    Topology(tp=8, dcp=8),
    Topology(pcp=2, dcp=2),
    Topology(pcp=3, dcp=3),
    Topology(pcp=5, dcp=5),
    Topology(tp=2, pcp=2, dcp=2),
    Topology(tp=2, pcp=2, dcp=4),
    Topology(tp=2, pcp=3, dcp=6),
    Topology(tp=2, pcp=4, dcp=8),
    Topology(tp=4, pcp=2, dcp=4),
    Topology(tp=4, pcp=2, dcp=8),
]
FOUR = [
    Topology(tp=4, dcp=4),
    Topology(pcp=4),
    Topology(pcp=4, dcp=4),
    Topology(tp=2, pcp=2, dcp=2),
    Topology(tp=2, pcp=2, dcp=4),
]
SOME = [Topology(tp=4, dcp=4), Topology(tp=2, pcp=2, dcp=4)]
HEADS = {1: 3, 2: 6, 3: 3, 4: 12, 5: 5, 6: 6, 8: 8}

# With at most 3 tokens decoding: prompts, decode rows of one and several tokens, chunks of prompts
# with cached context and requests without a new token, in many orders; forks, cuts and departures.
MIXED: Script = (
    step(("a", 9), ("b", 4)),
    step(("c", 7), ("a", 1), ("b", 6), ("d", 1)),
    step(("c", 11), ("b", 0), ("a", 2), ("e", 5), ("d", 4)),
    ("fork", "c", "f"),
    ("truncate", "a", 7),
    step(("f", 5), ("a", 1), ("c", 1), ("b", 3)),
    ("free", "c"),
    ("truncate", "f", 20),
    step(("g", 2), ("f", 3), ("a", 8), ("e", 1), ("h", 17)),
    step(("a", 0), ("b", 1), ("h", 9), ("f", 1)),
    ("truncate", "b", 0),
    step(("b", 2), ("h", 1)),
    step(("b", 0), ("f", 0)),
)

VARIANTS: list[dict[str, Any]] = [
    {},
    {"prefill": "gather_kv", "q_lora_rank": 7, "interleave": 2, "layer_idx": 1},
    {"prefill": "gather_q", "rope_interleave": False, "workspace_tokens": 9, "block": 3},
    {
        "prefill": "ring",
        "q_lora_rank": 5,
        "bias": True,
        "interleave": 3,
        "workspace_tokens": 5,
    },
    {"prefill": "gather_kv", "softcap": 3.0, "interleave": 16, "block": 2, "workspace_tokens": 6},
    {
        "prefill": "gather_q",
        "yarn": (4.0, 0.7),
        "q_lora_rank": 7,
        "rope_interleave": False,
        "workspace_tokens": 1,
    },
    # by the size of the latent, keys are expanded for 2 rows and more, or for none at all; above
    # the number of rows decides
    {
        "prefill": "gather_kv",
        "kv_lora_rank": 12,
        "nope_dim": 2,
        "value_dim": 1,
        "workspace_tokens": 11,
        "interleave": 2,
    },
    {
        "prefill": "ring",
        "kv_lora_rank": 3,
        "nope_dim": 4,
        "value_dim": 9,
        "workspace_tokens": 11,
        "interleave": 5,
    },
]


def every_way(topology: Topology) -> list[Setup]:
    """All ways to decode and to combine, variants taking turns."""
    base = Setup(topology, HEADS[topology.tp], max_decode_tokens=3)
    ways = enumerate(product(DECODES, COMBINES))
    return [
        replace(base, decode=decode, combine=combine, **VARIANTS[i % len(VARIANTS)])
        for i, (decode, combine) in ways
    ]


def sampled(topology: Topology) -> list[Setup]:
    """Above 4 ranks one way to combine for each way to decode, taking turns."""
    ways = every_way(topology)
    if topology.world_size <= 4:
        return ways
    first = TOPOLOGIES.index(topology)
    return [ways[3 * i + (first + i) % 3] for i in range(len(DECODES))]


def check_ways(ranks: Any, setups: list[Setup]) -> None:
    outputs = check_scripts(ranks, tuple(setups), MIXED)
    assert [[len(out) for out in outs] for outs in outputs] == [
        [sum(new for _, new in args[0]) for name, *args in MIXED if name == "step"]
    ] * len(setups)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("topology", TOPOLOGIES, ids=str)
def test_the_ways_to_decode_and_to_combine_are_dense_attention(
    ranks: Any, topology: Topology
) -> None:
    check_ways(ranks, sampled(topology))


@pytest.mark.slow
@pytest.mark.parametrize("topology", [t for t in TOPOLOGIES if t.world_size > 4], ids=str)
def test_every_way_to_decode_and_to_combine_is_dense_attention(
    ranks: Any, topology: Topology
) -> None:
    check_ways(ranks, every_way(topology))


@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.parametrize("topology", [Topology(), *SOME], ids=str)
def test_every_variant_of_the_layer(ranks: Any, topology: Topology, decode: str) -> None:
    base = Setup(topology, HEADS[topology.tp], decode=decode, max_decode_tokens=3, seed=2)
    check_scripts(ranks, tuple(replace(base, **variant) for variant in VARIANTS), MIXED[:6])


@pytest.mark.parametrize("heads", [(1, 5), (2, 10), (3, 9), (4, 20)])
def test_other_sizes(ranks: Any, heads: tuple[int, int]) -> None:
    """Values wider than keys, a latent narrower than a head, R of 2 and 6; 3 and 5 heads a rank."""
    tp, num_heads = heads
    shapes = [
        {"kv_lora_rank": 3, "nope_dim": 4, "rope_dim": 2, "value_dim": 9, "hidden": 16},
        {"kv_lora_rank": 13, "nope_dim": 1, "rope_dim": 6, "value_dim": 2, "hidden": 10},
        {"kv_lora_rank": 1, "nope_dim": 3, "rope_dim": 4, "value_dim": 1, "q_lora_rank": 1},
    ]
    base = Setup(Topology(tp=tp, dcp=tp), num_heads, max_decode_tokens=3, workspace_tokens=8)
    setups = [replace(base, decode=decode, **shape) for decode in DECODES for shape in shapes]
    check_scripts(ranks, tuple(setups), MIXED[:4])


# Named cases


@pytest.mark.parametrize("decode", DECODES)
def test_context_shorter_than_one_interleave_leaves_ranks_empty(ranks: Any, decode: str) -> None:
    """vLLM, skip of empty context: N 4, I 16, context 10; ranks 1 to 3 hold nothing. No hang."""
    script = (prompts(10), prompts(1), prompts(3), prompts(9), prompts(2))
    for topology in (Topology(tp=4, dcp=4), Topology(pcp=4, dcp=4), Topology(tp=2, pcp=2, dcp=4)):
        setups = tuple(
            Setup(
                topology,
                4,
                decode=decode,
                interleave=16,
                block=16,
                prefill=prefill,
                max_decode_tokens=most,
                workspace_tokens=workspace,
            )
            for prefill, most, workspace in (
                ("auto", 16, 1024),
                ("gather_kv", 2, 1024),
                ("gather_kv", 0, 5),
                ("gather_q", 2, 1024),
                ("gather_q", 0, 1024),
                ("ring", 0, 5),
            )
        )
        check_scripts(ranks, setups, script)


@pytest.mark.parametrize("combine", COMBINES)
def test_several_new_tokens_over_a_sharded_cache(ranks: Any, combine: str) -> None:
    """vLLM-Ascend 11492 and 11849: N 2, I 1, length 6 of which 4 are new; as rows and as chunk."""
    setups = tuple(
        Setup(Topology(tp=2, dcp=2), 6, decode=decode, combine=combine, max_decode_tokens=most)
        for decode in DECODES
        for most in (16, 3)
    )
    check_scripts(ranks, setups, (prompts(2), prompts(4), prompts(2), prompts(4, 5)))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("topology", [Topology(pcp=4), *SOME], ids=str)
@pytest.mark.parametrize("most", [0, 1, 16])
@pytest.mark.parametrize(
    "lengths",
    [
        pytest.param((1, 2, 3, 30), id="torch-and-lucidrains"),
        pytest.param((7, 7, 18), id="ring-flash-attention-51"),
        pytest.param((2, 0, 2), id="vLLM-Ascend-11807"),
        pytest.param((1, 3, 2), id="vLLM-Ascend-6491"),
        pytest.param((1, 1, 7), id="vLLM-42674"),
    ],
)
def test_packed_lengths(
    ranks: Any, topology: Topology, most: int, lengths: tuple[int, ...]
) -> None:
    """As prompts, then as new tokens over cached context: as chunks, as decode rows, and mixed."""
    setups = tuple(
        Setup(
            topology,
            4,
            decode=decode,
            interleave=3,
            prefill=prefill,
            max_decode_tokens=most,
            workspace_tokens=13,
        )
        for decode, prefill in zip(DECODES, PREFILLS, strict=True)
    )
    check_scripts(ranks, setups, (prompts(*lengths), prompts(*lengths[::-1]), prompts(1, 1, 1)))


@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.parametrize("dcp", [1, 2, 4])
def test_o_proj_after_context_parallelism(ranks: Any, decode: str, dcp: int) -> None:
    """TensorRT-LLM 10350: TP 2 x CP 2; heads reach the o_proj slice that holds their columns."""
    setup = Setup(Topology(tp=2, pcp=2, dcp=dcp), 6, decode=decode, bias=True, q_lora_rank=5)
    check_script(ranks, setup, (prompts(9, 2), prompts(1, 2), prompts(1, 1), prompts(17, 1)))


# Cached context in pieces


CONTEXTS = {
    "13": (13,),
    "960 and seven of 16": (960, *[16] * 7),
    "2048 and 320": (2048, 320),
    "37, 1000, 5": (37, 1000, 5),
    "4, none, 2": (4, 0, 2),
    "1": (1,),
}
BY_SIZE = {
    1: Topology(tp=2),
    2: Topology(pcp=2, dcp=2),
    4: Topology(tp=2, pcp=2, dcp=4),
    8: Topology(tp=8, dcp=8),
}


def contextual(contexts: tuple[int, ...]) -> Script:
    """Contexts, then a chunk of each prompt, then a decode step over what the chunks have left."""
    chunk = [4 + i % 3 for i in range(len(contexts))]
    return (
        prompts(*contexts),
        prompts(*chunk),
        prompts(*[1 + i % 2 for i in range(len(contexts))]),
    )


def layers_on(topology: Topology, contexts: tuple[int, ...]) -> list[Setup]:
    """Layouts and workspaces; the last one of each layout takes every context in one piece."""
    heads = 8 if topology.tp == 8 else 2
    base = Setup(
        topology, heads, num_blocks=1300, max_decode_tokens=2, hidden=10, prefill="gather_kv"
    )
    short = sum(contexts) < 100
    setups = []
    # two of the four layouts, in turn, so that each context sees all of them over the sizes
    turn = (list(CONTEXTS.values()).index(contexts) + list(BY_SIZE).index(topology.dcp)) % 2
    for i, (interleave, block) in enumerate(((1, 4), (3, 16), (16, 4), (40, 16))[turn::2]):
        for workspace in (1, 2, 7, 1024, 1 << 30) if short else (1024, 1 << 30):
            # both ways to decode over gathered and over resting latents, in turn
            decode = DECODES[(i + len(setups)) % 4]
            setups.append(
                replace(
                    base,
                    decode=decode,
                    interleave=interleave,
                    block=block,
                    workspace_tokens=workspace,
                )
            )
    return setups


def gathered_and_played(
    setups: tuple[Setup, ...], script: Script
) -> list[tuple[list[Tensor], list[int]]]:
    """Outputs of each step, and how many all-gathers over dcp each has made."""
    results = []
    for setup in setups:
        live, outs, counts = build(setup), [], []
        for part in script:
            with live.mesh.traffic.capture() as log:
                outs.append(play(live, (part,))[0][0])
            counts.append(log.totals().get(("dcp", "all_gather"), (0, 0))[0])
        results.append((outs, counts))
    return results


@pytest.mark.sampled(3)
@pytest.mark.parametrize("size", BY_SIZE)
@pytest.mark.parametrize("contexts", CONTEXTS.values(), ids=CONTEXTS)
def test_context_in_pieces_is_context_in_one(
    ranks: Any, contexts: tuple[int, ...], size: int
) -> None:
    """Of which the first two cases are vLLM 28476 (a piece of 4 rows) and 41229."""
    topology, script = BY_SIZE[size], contextual(contexts)
    setups = layers_on(topology, contexts)
    answers = ranks(8).run(gathered_and_played, tuple(setups), script, n=topology.world_size)
    wanted = exact(setups[0], script)
    several = 0
    for i, setup in enumerate(setups):
        outs, counts = answers[0][i]
        for answer in answers:
            assert all(x.equal(y) for x, y in zip(answer[i][0], outs, strict=True))
            assert answer[i][1] == counts
        for out, want in zip(outs, wanted, strict=True):
            check_close(out, want)
        # rank 0 holds the largest share of every context, and a piece takes so many rows of it
        shares = [
            sum(position // setup.interleave % size == 0 for position in range(context))
            for context in contexts
        ]
        pieces = -(-sum(shares) // max(1, setup.workspace_tokens // size))
        assert counts[1] == (pieces if size > 1 else 0)
        several += pieces > 1
        one = next(s for s in setups[i:] if s.workspace_tokens == 1 << 30)
        for out, same in zip(outs, answers[0][setups.index(one)][0], strict=True):
            check_close(out, same.double())
    assert several or sum(contexts) == 1


@pytest.mark.parametrize("requests", [3, 5, 6, 7, 9])
def test_any_number_of_requests_shares_the_workspace(ranks: Any, requests: int) -> None:
    """vLLM 41229: N 8; chunks of all of them at once, and decoding over gathered latents."""
    lengths = [20 + 7 * i for i in range(requests)]
    script = (
        prompts(*lengths),
        prompts(*[3 + i % 2 for i in range(requests)]),
        prompts(*[1] * requests),
    )
    setups = tuple(
        Setup(
            topology,
            8,
            decode="gather_kv",
            interleave=interleave,
            block=16,
            prefill="gather_kv",
            max_decode_tokens=2,
            workspace_tokens=workspace,
        )
        for topology in (Topology(tp=8, dcp=8), Topology(tp=2, pcp=4, dcp=8))
        for interleave, workspace in ((1, 100), (3, 64), (16, 128))
    )
    check_scripts(ranks, setups, script)


def test_one_prompt_in_chunks_is_one_prompt(ranks: Any) -> None:
    """Chunks of 8, 1, 9 and 12 tokens; the last row of each equals the same row of the whole."""
    cuts = (8, 1, 9, 12)
    for topology in FOUR:
        setup = Setup(topology, 4, interleave=2, max_decode_tokens=0, workspace_tokens=6)
        setups = tuple(replace(setup, prefill=prefill) for prefill in PREFILLS)
        check_scripts(ranks, setups, tuple(step(("a", cut)) for cut in cuts))


def reused(setup: Setup) -> tuple[int, list[Tensor]]:
    """Tokens found in the cache for a second prompt, and the outputs of both and of a token."""
    live = build(setup)
    live.cache.add("a", range(50))
    outs = [live.step((("a", 50),))[0]]
    matched = live.cache.add("b", [*range(45), *range(100, 110)])
    outs.append(live.step((("b", 55 - matched), ("a", 1)))[0])
    outs.append(live.step((("b", 1),))[0])
    return matched, outs


@pytest.mark.parametrize("topology", FOUR, ids=str)
@pytest.mark.parametrize("way", ["gather_q", "gather_kv"])
def test_a_prompt_follows_a_prefix_that_another_has_left(
    ranks: Any, topology: Topology, way: str
) -> None:
    setup = Setup(
        topology,
        4,
        decode=way,
        prefill=way,
        interleave=2,
        max_decode_tokens=3,
        workspace_tokens=10,
    )
    answers = ranks(8).run(reused, setup, n=4)
    matched, outs = answers[0]
    assert 16 <= matched <= 45
    dense = Dense(setup)
    wanted = dense.run((step(("a", 50)),))
    dense.seen["b"] = dense.seen["a"][:matched]
    wanted += dense.run((step(("b", 55 - matched), ("a", 1)), step(("b", 1))))
    for other, result in answers:
        assert other == matched
        assert all(x.equal(y) for x, y in zip(result, outs, strict=True))
    for out, want in zip(outs, wanted, strict=True):
        check_close(out, want)


# Precision


@pytest.mark.sampled(2)
@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.parametrize("topology", [Topology(), *SOME], ids=str)
def test_float64_is_exact_where_lse_is_not_rounded(
    ranks: Any, topology: Topology, decode: str
) -> None:
    """lse has 24 bits also beside float64 outputs: 1e-6, a tenth of what float32 is held to."""
    setups = tuple(
        Setup(
            topology,
            4,
            decode=decode,
            combine=combine,
            interleave=2,
            prefill=prefill,
            max_decode_tokens=3,
            workspace_tokens=9,
            dtype=torch.float64,
        )
        for combine, prefill in zip(COMBINES, PREFILLS[1:], strict=True)
    )
    outputs = ranks(8).run(run_scripts, setups, MIXED, n=topology.world_size)[0]
    for setup, outs in zip(setups, outputs, strict=True):
        for (out, _), want in zip(outs, exact(setup, MIXED), strict=True):
            assert out.dtype is torch.float64
            if want.numel():
                assert (out - want).abs().max() <= 1e-6 * want.abs().max()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("topology", FOUR, ids=str)
def test_low_precision_is_as_good_as_one_rank(
    ranks: Any, topology: Topology, dtype: torch.dtype
) -> None:
    """Within twice the error that the unsharded layer has in the same type."""
    script = (prompts(30, 5, 17), prompts(1, 9, 2), prompts(11, 1, 6), prompts(1, 1, 1))
    base = Setup(
        topology,
        8,
        kv_lora_rank=16,
        hidden=32,
        interleave=2,
        max_decode_tokens=3,
        workspace_tokens=16,
        dtype=dtype,
    )
    setups = tuple(
        replace(base, decode=decode, prefill=prefill)
        for decode, prefill in zip(DECODES, PREFILLS, strict=True)
    )
    alone = tuple(replace(setup, topology=Topology()) for setup in setups)
    wanted = exact(base, script)
    sharded = ranks(8).run(run_scripts, setups, script, n=4)
    single = ranks(8).run(run_scripts, alone, script, n=1)[0]
    for i in range(len(setups)):
        for number, want in enumerate(wanted):  # chunks and decode rows each by themselves
            largest = error_of(single[i][number][0], want)
            assert largest > 0
            for answer in sharded:
                assert error_of(answer[i][number][0], want) <= 2 * largest


@pytest.mark.parametrize("prefill", ["gather_kv", "ring"])
@pytest.mark.parametrize("topology", [Topology(), Topology(tp=2, dcp=2)], ids=str)
def test_many_pieces_round_no_worse_than_one(ranks: Any, topology: Topology, prefill: str) -> None:
    """A chunk, and rows that decode, over 1,200 tokens of context in hundreds of pieces."""
    base = Setup(
        topology,
        8,
        kv_lora_rank=16,
        hidden=32,
        decode="gather_kv",
        prefill=prefill,
        num_blocks=320,
        max_decode_tokens=3,
        dtype=torch.bfloat16,
    )
    script = (prompts(1200), prompts(20), prompts(2))
    one = replace(base, topology=Topology())
    many = replace(base, workspace_tokens=1)
    wanted = exact(base, script)
    ((single,),) = ranks(8).run(run_scripts, (one,), script, n=1)
    for (outs,) in ranks(8).run(run_scripts, (many,), script, n=topology.world_size):
        for (out, _), (alone, _), want in zip(outs, single, wanted, strict=True):
            assert error_of(out, want) <= 2 * error_of(alone, want)


def error_of(out: Tensor, want: Tensor) -> float:
    return float((out.double() - want).norm())


# Errors


def state(live: Live) -> tuple[dict[str, Any], list[Tensor]]:
    """Lengths and block tables, and what the cache holds, 7 in slots not written yet."""
    cache = live.cache
    slots = cache.pool.num_blocks * cache.layout.block_size
    stored = [plane.nan_to_num(7.0) for layer in (0, 1) for plane in cache.view(layer, 0, slots)]
    return {str(s): (cache.length(s), cache.block_table(s)) for s in cache.seqs}, stored


class Fault(RuntimeError):
    pass


def fail(module: nn.Module, args: tuple[Any, ...]) -> None:
    raise Fault("a layer fails")


MODULES = ("o_proj", "kv_a_proj_with_mqa", "kv_a_layernorm", "q_b_proj")


class FailOnSend:
    """In place of the traffic log's record: raises before the n-th collective, on all ranks."""

    def __init__(self, mesh: CPMesh, number: int) -> None:
        self.real, self.number, self.calls = mesh.traffic.record, number, 0

    def __call__(self, axis: str, operation: str, sent: int) -> None:
        if self.calls == self.number:
            raise Fault("a layer fails")
        self.calls += 1
        self.real(axis, operation, sent)


def attempt(live: Live, requests: tuple[tuple[str, int], ...], guarded: bool) -> None:
    plan = live.plan(requests)
    with live.mesh.guard() if guarded else nullcontext():
        live.forward(plan)


def repeat_after_failure(
    setup: Setup, guarded: bool
) -> tuple[bool, int, list[Tensor], list[Tensor]]:
    """Whether committed content survived failed steps, and at how many places they failed.

    Then what follows, of a layer unharmed and of one that had failed at all these places.
    """
    requests = (("a", 2), ("new", 5), ("c", 7), ("b", 4))
    results = []
    survived, places = True, list[str | int]()
    for harmed in (False, True):
        live = build(setup)
        live.step((("a", 21), ("b", 2)))
        live.cache.fork("a", "c")
        if not harmed:
            places += MODULES
            with live.mesh.traffic.capture() as log:
                attempt(live, requests, guarded)
            places += range(len(log))
        for place in places if harmed else ():
            before = state(live)
            hook = None
            if isinstance(place, str):
                module = getattr(live.layer, place)
                hook = module.register_forward_pre_hook(fail)
            else:
                live.mesh.traffic.record = FailOnSend(live.mesh, place)
            with pytest.raises(Fault):
                attempt(live, requests, guarded)
            if hook is None:
                del live.mesh.traffic.record
            else:
                hook.remove()
            after = state(live)
            before[0].setdefault("new", (0, ()))
            survived &= after[0] == before[0] and committed_is_kept(live, before[1], after[1])
        results.append([live.step(requests)[0], live.step((("c", 1), ("a", 9), ("new", 2)))[0]])
    return survived, len(places), *results


def committed_is_kept(live: Live, before: list[Tensor], after: list[Tensor]) -> bool:
    """Whether every slot of a committed token holds what it held."""
    layout, rank = live.cache.layout, live.mesh.rank("dcp")
    for seq in live.cache.seqs:
        table, size, local = live.cache.block_table(seq), layout.block_size, 0
        for position in range(live.cache.length(seq)):
            if position // layout.interleave_size % layout.cp_size == rank:
                slot = table[local // size] * size + local % size
                local += 1
                if not all(x[slot].equal(y[slot]) for x, y in zip(before, after, strict=True)):
                    return False
    return True


@pytest.mark.sampled(4)
@pytest.mark.parametrize("guarded", [False, True], ids=["bare", "guarded"])
@pytest.mark.parametrize(
    ("decode", "prefill"),
    [
        ("gather_q", "gather_kv"),
        ("replicate_q", "gather_q"),
        ("gather_kv", "ring"),
        ("auto", "auto"),
    ],
)
@pytest.mark.parametrize("topology", [Topology(), Topology(pcp=4), *SOME], ids=str)
def test_a_failed_step_changes_nothing_and_can_be_repeated(
    ranks: Any, topology: Topology, decode: str, prefill: str, guarded: bool
) -> None:
    """It fails in a module or before any of its collectives, so between two pieces as well."""
    setup = Setup(
        topology,
        4,
        q_lora_rank=5,
        decode=decode,
        prefill=prefill,
        interleave=2,
        max_decode_tokens=3,
        workspace_tokens=8,
    )
    answers = ranks(8).run(repeat_after_failure, setup, guarded, n=topology.world_size)
    for survived, places, unharmed, repeated in answers:
        assert survived
        # c and b have 21 and 2 tokens of context: at least 23 / 8 pieces
        assert places >= len(MODULES) + 3 * (topology.dcp > 1 and prefill != "auto")
        assert all(x.equal(y) for x, y in zip(unharmed, repeated, strict=True))
        assert all(x.equal(y) for x, y in zip(repeated, answers[0][3], strict=True))


def wrong_rows(live: Live, extra: int) -> None:
    plan = live.plan((("a", 2), ("new", 9)))
    x, position_embeddings = live.inputs(plan)
    x = torch.cat([x, x[:1]]) if extra > 0 else x[:-1]
    live.layer(x, position_embeddings, live.cache, plan)


def too_many_rows(live: Live) -> None:
    wrong_rows(live, 1)


def too_few_rows(live: Live) -> None:
    wrong_rows(live, -1)


def stale_decode_plan(live: Live) -> None:
    plan = live.plan((("a", 2),))
    live.plan((("a", 1),))
    live.forward(plan)


def stale_chunk_plan(live: Live) -> None:
    plan = live.plan((("a", 9),))
    live.cache.truncate("a", 3)
    live.cache.add("unused")
    live.forward(plan)


def refusal(setup: Setup, misuse: Callable[[Live], None]) -> tuple[type, str, bool]:
    """The error of a misuse, and whether the stored content is as before."""
    live = build(setup)
    live.step((("a", 7), ("b", 2)))
    before = state(live)
    try:
        misuse(live)
    except (ConfigError, StateError) as error:
        kept = all(x.equal(y) for x, y in zip(before[1], state(live)[1], strict=True))
        return type(error), str(error), kept
    raise AssertionError("nothing was refused")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("topology", [Topology(tp=4, dcp=4), Topology(tp=2, pcp=2, dcp=4)], ids=str)
@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.parametrize(
    ("misuse", "error", "message"),
    [
        (too_many_rows, ConfigError, "the plan has"),
        (too_few_rows, ConfigError, "the plan has"),
        (stale_decode_plan, StateError, "stale"),
        (stale_chunk_plan, StateError, "stale"),
    ],
)
def test_misuse_of_a_step_is_refused_alike(
    ranks: Any,
    topology: Topology,
    decode: str,
    misuse: Callable[[Live], None],
    error: type,
    message: str,
) -> None:
    setup = Setup(topology, 4, decode=decode, max_decode_tokens=3)
    for kind, text, kept in ranks(8).run(refusal, setup, misuse, n=4):
        assert kind is error and message in text
        assert kept


def mismatched(change: str) -> None:
    setup = Setup(q_lora_rank=7)
    full = modules(setup)
    if change == "two query projections":
        full["q_proj"] = nn.Linear(setup.hidden, 27, bias=False)
    elif change == "no query projection":
        del full["q_b_proj"]
    else:
        full["kv_b_proj"] = nn.Linear(setup.kv_lora_rank, 24, bias=True)
    dims = {"qk_nope_head_dim": setup.nope_dim, "qk_rope_head_dim": setup.rope_dim}
    DCPMLAAttention.from_full(**full, **dims, layer_idx=0, mesh=CPMesh(Topology()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("two query projections", "q_proj together with, or without"),
        ("no query projection", "q_proj together with, or without"),
        ("bias on kv_b_proj", r"kv_b_proj.*bias"),  # it would be left out without a word
    ],
)
def test_projections_that_the_layer_cannot_have_are_refused(change: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        mismatched(change)


def sizes(setup: Setup) -> dict[str, Any]:
    """The constructor's sizes."""
    return {
        "hidden_size": setup.hidden,
        "num_heads": setup.num_heads,
        "q_lora_rank": setup.q_lora_rank,
        "kv_lora_rank": setup.kv_lora_rank,
        "qk_nope_head_dim": setup.nope_dim,
        "qk_rope_head_dim": setup.rope_dim,
        "v_head_dim": setup.value_dim,
    }


def construct(topology: Topology, overrides: dict[str, Any]) -> None:
    arguments = {**sizes(Setup(num_heads=8)), "layer_idx": 0, **overrides}
    DCPMLAAttention(**arguments, mesh=CPMesh(topology))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"combine": "sum"}, r"combine='sum'.*'ag_rs', 'a2a', 'ar'"),
        ({"decode": "absorb"}, r"decode='absorb'.*gather_q.*replicate_q.*gather_kv.*auto"),
        ({"num_heads": 6}, r"num_heads=6, tp=4: .*multiple of tp"),
        ({"num_heads": 0}, r"num_heads=0"),
        ({"qk_rope_head_dim": 5}, r"qk_rope_head_dim=5: .*pairs.*even"),
        ({"kv_lora_rank": 0}, r"kv_lora_rank=0"),
        ({"q_lora_rank": 0}, r"q_lora_rank=0"),
        ({"v_head_dim": 0}, r"v_head_dim=0"),
        ({"qk_nope_head_dim": 0}, r"qk_nope_head_dim=0"),
        ({"backend": "fast"}, r'backend="fast": no such backend.*auto or one of'),
    ],
)
def test_an_impossible_layer_is_refused_at_construction(
    ranks: Any, overrides: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):  # all ranks raised it, or run says otherwise
        ranks(8).run(construct, Topology(tp=4, dcp=2), overrides, n=4)


@pytest.mark.parametrize("workspace", [0, -1, 2.5, None])
def test_an_impossible_workspace_is_refused(workspace: Any) -> None:
    with pytest.raises(ConfigError, match=r"workspace_tokens="):
        PCPPrefillAttention(workspace_tokens=workspace, mesh=CPMesh(Topology()))


# The layer as a module


def constructed(setup: Setup) -> tuple[bool, dict[str, tuple[int, ...]], list[bool], str]:
    """A constructed layer with the weights of one from ``from_full``; shapes, and what is TPA."""
    given = build(setup)
    layer = DCPMLAAttention(
        **sizes(setup), **options(setup, given.mesh), norm_eps=EPS, bias=setup.bias
    )
    layer.to(setup.dtype)
    layer.load_state_dict(given.layer.state_dict())
    made = Live(setup, given.mesh, layer, build(setup).cache)
    outs = [[out for out, _ in play(live, MIXED[:3])] for live in (given, made)]
    same = all(x.equal(y) for x, y in zip(*outs, strict=True))
    shapes = {name: tuple(p.shape) for name, p in layer.named_parameters()}
    replicated = [isinstance(getattr(layer, n), TPAQProj) for n in ("q_b_proj", "kv_b_proj")]
    return same, shapes, replicated, layer.extra_repr()


@pytest.mark.parametrize("decode", DECODES)
def test_a_constructed_layer_and_what_it_holds(ranks: Any, decode: str) -> None:
    setup = Setup(
        Topology(tp=4, dcp=2), 12, q_lora_rank=7, bias=True, decode=decode, max_decode_tokens=3
    )
    heads = 6 if decode == "replicate_q" else 3
    for same, shapes, replicated, text in ranks(8).run(constructed, setup, n=4):
        assert same
        assert shapes == {
            "q_a_proj.weight": (7, 11),
            "q_a_proj.bias": (7,),
            "q_a_layernorm.weight": (7,),
            "q_b_proj.weight": (heads * 9, 7),
            "kv_a_proj_with_mqa.weight": (10, 11),
            "kv_a_proj_with_mqa.bias": (10,),
            "kv_a_layernorm.weight": (6,),
            "kv_b_proj.weight": (heads * 8, 6),
            "o_proj.weight": (11, 9),
            "o_proj.bias": (11,),
        }
        assert replicated == [decode == "replicate_q"] * 2
        assert f"decode={decode}" in text and "combine=a2a" in text
        assert "tp=4" in text and "dcp=2" in text and "pcp=1" in text


def full_checkpoint(setup: Setup) -> list[Tensor]:
    """A layer with replicated queries that loads the unsharded q_b_proj and kv_b_proj."""
    given = build(setup)
    layer = DCPMLAAttention(**sizes(setup), **options(setup, given.mesh), norm_eps=EPS)
    full = modules(setup)
    checkpoint = {
        f"{name}.weight": full[name].state_dict()["weight"] for name in ("q_b_proj", "kv_b_proj")
    }
    layer.load_state_dict({**given.layer.state_dict(), **checkpoint})
    return [out for out, _ in play(Live(setup, given.mesh, layer, given.cache), MIXED[:3])]


def test_replicated_projections_load_from_a_full_checkpoint(ranks: Any) -> None:
    setup = Setup(
        Topology(tp=4, dcp=2), 12, q_lora_rank=7, decode="replicate_q", max_decode_tokens=3
    )
    for outs in ranks(8).run(full_checkpoint, setup, n=4):
        for out, want in zip(outs, exact(setup, MIXED[:3]), strict=True):
            check_close(out, want)


def adopted(setup: Setup) -> tuple[list[str], MLASpec]:
    """Parameters of the full projections that the layer does not hold, and its cache spec."""
    full = modules(setup)
    layer = DCPMLAAttention.from_full(
        **full,
        qk_nope_head_dim=setup.nope_dim,
        qk_rope_head_dim=setup.rope_dim,
        **options(setup, CPMesh(setup.topology)),
    )
    held = {id(p) for p in layer.parameters()}
    lost = [
        f"{name}.{key}"
        for name, module in full.items()
        for key, p in module.named_parameters()
        if id(p) not in held
    ]
    return lost, layer.cache_spec


@pytest.mark.parametrize("decode", DECODES)
@pytest.mark.parametrize("q_lora_rank", [None, 7])
def test_from_full_keeps_the_parameters(ranks: Any, decode: str, q_lora_rank: int | None) -> None:
    setup = Setup(Topology(tp=2, dcp=2), 6, q_lora_rank, decode=decode)
    for lost, spec in ranks(8).run(adopted, setup, n=2):
        assert lost == []
        assert spec == MLASpec(kv_lora_rank=6, qk_rope_head_dim=4)


def test_yarn_scales_the_logits() -> None:
    """factor 4, mscale_all_dim 0.7: (1 + 0.07 ln 4)^2 = 1.2034981 over sqrt(9)."""
    mesh = CPMesh(Topology())
    arguments = {**sizes(Setup()), "layer_idx": 0, "mesh": mesh}
    assert DCPMLAAttention(**arguments).scoring.scale == pytest.approx(1 / 3, rel=1e-12)
    yarn = DCPMLAAttention(**arguments, yarn_factor=4.0, yarn_mscale_all_dim=0.7)
    assert yarn.scoring.scale == pytest.approx(1.2034981 / 3, rel=1e-7)
    given = DCPMLAAttention(**arguments, scale=0.25, yarn_factor=4.0, yarn_mscale_all_dim=0.7)
    assert given.scoring.scale == 0.25


def leading_dimensions(setup: Setup) -> bool:
    live = build(setup)
    live.step((("a", 5),))
    plan = live.plan((("a", 2), ("b", 3)))
    x, (cos, sin) = live.inputs(plan)
    flat = live.layer(x, (cos, sin), live.cache, plan)
    batched = live.layer(x[None], (cos[None], sin[None]), live.cache, plan)
    return batched.shape == (1, *flat.shape) and bool(batched[0].equal(flat))


def test_leading_dimensions_of_size_1_are_kept(ranks: Any) -> None:
    for decode in DECODES:
        setup = Setup(Topology(tp=2, dcp=2), 6, decode=decode)
        assert ranks(8).run(leading_dimensions, setup, n=2) == [True, True]


def test_the_sweep_covers_what_it_claims() -> None:
    assert {t.world_size for t in TOPOLOGIES} == {1, 2, 3, 4, 5, 6, 8}
    assert any(t.pcp > 1 and t.dcp > t.pcp for t in TOPOLOGIES)
    assert any(t.pcp == t.dcp > 1 for t in TOPOLOGIES)
    assert any(t.pcp > 1 == t.dcp for t in TOPOLOGIES)
    for topology in TOPOLOGIES:
        ways = every_way(topology)
        assert {(s.decode, s.combine) for s in ways} == set(product(DECODES, COMBINES))
        assert len({s.model for s in ways}) == len(VARIANTS)
        assert {s.decode for s in sampled(topology)} == set(DECODES)
        assert {s.prefill for s in ways} == set(PREFILLS)
    large = [s for t in TOPOLOGIES if t.world_size > 4 for s in sampled(t)]
    assert {(s.decode, s.combine) for s in large} == set(product(DECODES, COMBINES))
    assert {s.prefill for s in large} == set(PREFILLS)
