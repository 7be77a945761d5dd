"""Batches of chunks, decode rows and prompts equal dense attention, and each request alone.

A batch has requests of (cached, new) tokens. The cached ones are computed first, in steps of at
most ``chunk`` tokens a request, the prefill strategies taking turns. The new ones are computed in
one step, which is run by every strategy over the same cache. Last, every request is computed alone,
in one chunk, in a cache of its own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import attention_cases as plain
import mla_cases as latent
from attention_cases import check_close
from hypothesis import example, given
from hypothesis import strategies as st
from mla_cases import COMBINES, DECODES, poisoned
from test_attention_properties import PLACES
from test_mla_properties import TOPOLOGIES as LATENT_TOPOLOGIES
from torch import Tensor, cat, no_grad

from cplayers.attention import PCPPrefillAttention, gather_rows, take_rows
from cplayers.cache import InterleavedLayout
from cplayers.mesh import Topology

Setup = plain.Setup | latent.Setup
STRATEGIES = ("auto", "gather_q", "gather_kv", "ring")


@dataclass(frozen=True)
class Batch:
    """Requests of (cached, new) tokens, and how the step came about.

    ``order`` is that of the requests in the step; with ``forget``, what no window reaches is given
    back after every step; ``turn`` says which strategy and way of combining is the first.
    """

    lengths: tuple[tuple[int, int], ...]
    order: tuple[int, ...]
    chunk: int = 64
    forget: bool = False
    turn: int = 0

    @property
    def seqs(self) -> range:
        return range(len(self.lengths))

    def fitted(self, setup: Setup) -> Setup:
        """The setup with as many blocks as it needs."""
        layout = InterleavedLayout(setup.topology.dcp, setup.interleave, setup.block)
        blocks = sum(layout.blocks(cached + new) for cached, new in self.lengths)
        return replace(setup, num_blocks=max(1, blocks))


def hidden_of(setup: Setup, seq: int, length: int) -> Tensor:
    """Hidden states of a sequence from position 0 on, fp64, representable in fp32."""
    seed = 7919 * setup.seed + 31 * seq + 5
    return plain._normal(seed, length, setup.hidden).float().double()


def module_of(setup: Setup) -> Any:
    return latent if isinstance(setup, latent.Setup) else plain


def exact_of(setup: Setup, batch: Batch) -> list[Tensor]:
    """Of each sequence all rows, by the reference."""
    dense = module_of(setup).Dense(setup)
    return [
        dense._attend(hidden_of(setup, seq, sum(length)))
        for seq, length in enumerate(batch.lengths)
    ]


# On the ranks


class Runner:
    """A layer, a cache, and the hidden states of the batch."""

    def __init__(self, setup: Setup, batch: Batch) -> None:
        self.setup, self.batch = setup, batch
        self.live = poisoned(module_of(setup).build(setup))
        self.x = [hidden_of(setup, seq, sum(length)) for seq, length in enumerate(batch.lengths)]

    def use(self, turn: int) -> None:
        """Another strategy and another way to combine."""
        self.live.layer.prefill = PCPPrefillAttention(
            STRATEGIES[turn % len(STRATEGIES)],
            workspace_tokens=self.setup.workspace_tokens,
            mesh=self.live.mesh,
        )
        self.live.layer.combine = COMBINES[turn % len(COMBINES)]

    def step(self, requests: list[tuple[int, int]], *, commit: bool = True) -> dict[int, Tensor]:
        """The rows of each sequence."""
        live, setup = self.live, self.setup
        plan = live.plan(tuple(requests))
        parts = [
            self.x[seq][cached : cached + new]
            for (seq, new), cached in zip(requests, plan.cached, strict=True)
        ]
        packed = cat([*parts, plain._normal(0, 0, setup.hidden)]).to(setup.dtype)
        dim = setup.rope_dim if isinstance(setup, latent.Setup) else setup.head_dim
        angles = [t.to(setup.dtype) for t in plain.rope_tables(plan.positions, dim)]
        with no_grad():
            rows = live.layer(take_rows(packed, plan), tuple(angles), live.cache, plan)
            rows = gather_rows(rows, plan, live.mesh)
        if commit:
            live.cache.commit(plan)
            if self.batch.forget:
                for seq, _ in requests:
                    live.cache.forget(seq, live.cache.length(seq) + 1 - setup.window)
        return {
            seq: part for (seq, _), part in zip(requests, rows.split(list(plan.new)), strict=True)
        }


def run_batch(setup: Setup, batch: Batch) -> list[list[Tensor]]:
    """All rows of each sequence: by each strategy, and last of each request alone."""
    runner = Runner(setup, batch)
    left = [cached for cached, _ in batch.lengths]
    before: list[list[Tensor]] = [[] for _ in left]
    turn = batch.turn
    while any(left):
        requests = [(seq, min(batch.chunk, left[seq])) for seq in batch.seqs if left[seq]]
        runner.use(turn)
        turn += 1
        for seq, rows in runner.step(requests).items():
            before[seq].append(rows)
            left[seq] -= len(rows)
    results = []
    requests = [(seq, batch.lengths[seq][1]) for seq in batch.order]
    for i in range(len(STRATEGIES)):
        # strategies and ways to combine meet in all pairs over the examples
        runner.use(batch.turn + i)
        runner.live.layer.combine = COMBINES[(batch.turn // len(STRATEGIES) + i) % len(COMBINES)]
        out = runner.step(requests, commit=i == len(STRATEGIES) - 1)
        results.append([cat([*before[seq], out[seq]]) for seq in batch.seqs])
    for seq in batch.seqs:
        runner.live.cache.free(seq)
    alone = []
    for seq in batch.seqs:
        alone.append(runner.step([(seq, sum(batch.lengths[seq]))])[seq])
        runner.live.cache.free(seq)
    return [*results, alone]


def check_batch(ranks: Any, setup: Setup, batch: Batch) -> None:
    setup = batch.fitted(setup)
    answers = ranks(8).run(run_batch, setup, batch, n=setup.topology.world_size)
    wanted = exact_of(setup, batch)
    largest = max((t.abs().max() for t in wanted if t.numel()), default=None)
    alone = answers[0][-1]
    for answer in answers:
        for result, first in zip(answer, answers[0], strict=True):
            assert all(x.equal(y) for x, y in zip(result, first, strict=True))
    for i, result in enumerate(answers[0]):
        for seq, (got, want, single) in enumerate(zip(result, wanted, alone, strict=True)):
            try:
                check_close(got, want, largest)
                check_close(got, single.double(), largest)
            except AssertionError as error:
                way = "alone" if i == len(STRATEGIES) else STRATEGIES[(batch.turn + i) % 4]
                raise AssertionError(f"{way}, sequence {seq}: {error}") from None


# What is drawn

CHUNK_STEPS = 4


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """A few small ints and a seed: what is drawn one by one is mostly small, and often the same."""
    count = draw(st.sampled_from([1, 2, 3, 4, 5, 6, 0]))
    longest, most = draw(st.sampled_from([(20, 9), (60, 30), (200, 70)]))
    rng = random.Random(draw(st.integers(0, 9999)))
    lengths = tuple(
        (
            rng.choice([0, rng.randint(0, 20), rng.randint(0, longest)]),
            rng.choice([0, 1, 2, rng.randint(0, most), rng.randint(0, most)]),
        )
        for _ in range(count)
    )
    context = max((cached for cached, _ in lengths), default=0)
    return Batch(
        lengths,
        order=tuple(rng.sample(range(count), count)),
        chunk=max(draw(st.integers(1, 70)), -(-context // CHUNK_STEPS)),
        turn=draw(st.integers(0, 11)),
    )


def spread(draw: st.DrawFn) -> dict[str, Any]:
    """What layers of both kinds are spread by."""
    return {
        "interleave": draw(st.integers(1, 5) | st.integers(1, 40)),
        "block": draw(st.integers(1, 16)),
        "workspace_tokens": draw(st.integers(1, 64) | st.just(16384)),
        "max_decode_tokens": draw(st.integers(0, 4) | st.sampled_from([16, 70])),
        "layer_idx": draw(st.integers(0, 1)),
        "seed": draw(st.integers(0, 999)),
        "softcap": draw(st.sampled_from([None, 3.0])),
    }


GROUPED_PLACES = {place: heads for place, heads in PLACES.items() if place[0].world_size <= 8}


def most_spread(places: Iterable[Any], topology_of: Callable[[Any], Topology]) -> Any:
    """Places, those with a spread cache more often."""
    places = list(places)
    spread_out = [place for place in places if topology_of(place).dcp > 1]
    return st.sampled_from(spread_out) | st.sampled_from(places)


GROUPED = most_spread(GROUPED_PLACES, lambda place: place[0])
LATENT = most_spread(LATENT_TOPOLOGIES, lambda topology: topology)


@st.composite
def grouped(draw: st.DrawFn) -> plain.Setup:
    topology, q_proj = draw(GROUPED)
    heads, kv_heads = draw(st.sampled_from(GROUPED_PLACES[topology, q_proj]))
    return plain.Setup(
        topology,
        heads,
        kv_heads,
        head_dim=draw(st.sampled_from([2, 6, 16])),
        q_proj=q_proj,
        window=draw(st.none() | st.integers(1, 64)),
        sinks=draw(st.booleans()),
        **spread(draw),
    )


@st.composite
def latents(draw: st.DrawFn) -> latent.Setup:
    topology = draw(LATENT)
    return latent.Setup(
        topology,
        topology.tp * draw(st.integers(1, max(1, 8 // topology.tp))),
        q_lora_rank=draw(st.none() | st.integers(1, 9)),
        kv_lora_rank=draw(st.integers(1, 12) | st.just(16)),
        nope_dim=draw(st.integers(1, 9)),
        rope_dim=draw(st.sampled_from([2, 6, 16])),
        value_dim=draw(st.integers(1, 9)),
        decode=draw(st.sampled_from(DECODES)),
        **spread(draw),
    )


MIXED = Batch(((40, 7), (33, 1), (0, 3), (5, 20), (8, 0), (21, 2)), (3, 1, 5, 4, 0, 2), 17)
NONE_AT_ALL = Batch((), ())
NOTHING_NEW = Batch(((9, 0), (0, 0)), (1, 0), 4)
LONG = Batch(((200, 70), (150, 1)), (1, 0), 60)


@given(setup=grouped(), batch=batches(), forget=st.booleans())
@example(  # sinks count once, whatever the number of shards; windows in runs of 3 over 4 ranks
    plain.Setup(
        Topology(tp=2, pcp=2, dcp=4), 4, 1, sinks=True, window=9, interleave=3, max_decode_tokens=2
    ),
    MIXED,
    True,
)
@example(  # own heads of a TPA rank read KV heads 0, 1, 1: neither a run of them nor all
    plain.Setup(Topology(tp=4, dcp=4), 12, 3, q_proj="tpa", max_decode_tokens=1), MIXED, False
)
@example(  # queries of 4 PCP ranks and 2 TP neighbours, replicated
    plain.Setup(
        Topology(tp=2, pcp=4, dcp=8), 4, 1, q_proj="tpa", interleave=2, max_decode_tokens=0
    ),
    LONG,
    False,
)
@example(  # a window that ends inside runs longer than a piece; one row a rank and piece
    plain.Setup(
        Topology(pcp=3, dcp=3), 4, 2, window=30, interleave=16, block=4, workspace_tokens=1
    ),
    replace(MIXED, turn=1),
    True,
)
@example(plain.Setup(Topology(pcp=2, dcp=2), sinks=True), NONE_AT_ALL, False)
@example(plain.Setup(Topology(tp=2, pcp=2, dcp=2), max_decode_tokens=0), NOTHING_NEW, False)
def test_chunks_over_ranks_are_dense_attention_and_each_request_alone(
    ranks: Any, setup: plain.Setup, batch: Batch, forget: bool
) -> None:
    check_batch(ranks, setup, replace(batch, forget=forget and setup.window is not None))


@given(setup=latents(), batch=batches())
@example(  # a group that spans both axes; decode rows beside chunks with context
    latent.Setup(
        Topology(tp=4, pcp=2, dcp=4), 8, 5, decode="auto", interleave=3, workspace_tokens=9
    ),
    replace(MIXED, turn=2),
)
@example(  # heads of the whole group leave the latent before they are combined
    latent.Setup(
        Topology(tp=2, pcp=4, dcp=8), 4, decode="replicate_q", interleave=2, max_decode_tokens=0
    ),
    LONG,
)
@example(latent.Setup(Topology(pcp=2, dcp=2), decode="gather_kv"), NONE_AT_ALL)
@example(latent.Setup(Topology(pcp=3), max_decode_tokens=0), NOTHING_NEW)
def test_chunks_of_latent_attention_are_dense_attention_and_each_request_alone(
    ranks: Any, setup: latent.Setup, batch: Batch
) -> None:
    check_batch(ranks, setup, batch)


def test_the_draws_cover_every_number_of_ranks() -> None:
    for topologies in (LATENT_TOPOLOGIES, [topology for topology, _ in GROUPED_PLACES]):
        assert {topology.world_size for topology in topologies} == set(range(1, 9))
        assert any(t.pcp > 1 and t.dcp > t.pcp for t in topologies)
