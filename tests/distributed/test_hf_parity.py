"""Parallelized models equal transformers' own: every family, head count, layout and option."""

from __future__ import annotations

import itertools

import parity
import pytest
from parity import Layout, Tiny

TOLERANCE = 1e-4  # relative to the largest logit; fp32 against float64

MODELS = [
    Tiny(family, heads, kv_heads)
    for family in ("llama", "qwen2", "qwen3")
    for heads, kv_heads in ((8, 2), (8, 1), (4, 4), (12, 3))
]
CACHES = list(itertools.product((1, 2, 3, 16, 40), (4, 16)))
COMBINES = ("a2a", "ag_rs", "ar")
SAMPLE = 29  # prime to the number of caches and combines, so that all of them are met


def layouts(tiny: Tiny) -> list[Layout]:
    """Every valid degree with both projections and all combines; caches take turns.

    The turns differ between models, so that over all models every degree that 8 query and 2 KV
    heads allow meets every cache (asserted below).
    """
    turn = itertools.count(7 * MODELS.index(tiny))
    return [
        Layout(tp, dcp, pcp, *CACHES[next(turn) % len(CACHES)], combine, q_proj)
        for q_proj in ("gather", "tpa")
        for tp, dcp, pcp in parity.degrees(tiny.heads, tiny.kv_heads, q_proj)
        for combine in COMBINES
    ]


def check(ranks, tiny: Tiny, chosen: list[Layout]) -> None:
    expected = parity.expect(tiny)
    for size, group in itertools.groupby(sorted(chosen, key=lambda x: x.ranks), lambda x: x.ranks):
        part = list(group)
        results = ranks(8).run(parity.compare, tiny, part, expected, n=size, timeout=1200)
        for rank, result in enumerate(results):
            for layout, (error, wrong) in zip(part, result, strict=True):
                assert wrong == 0, f"{layout} on rank {rank}: {wrong} greedy tokens differ"
                assert error < TOLERANCE, f"{layout} on rank {rank}: relative error {error:.1e}"
        assert all(result == results[0] for result in results), f"{part}: ranks differ"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_sampled_layouts_equal_transformers(ranks, tiny: Tiny) -> None:
    offset = MODELS.index(tiny)
    check(ranks, tiny, layouts(tiny)[offset::SAMPLE])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tiny", MODELS, ids=str)
def test_every_layout_equals_transformers(ranks, tiny: Tiny) -> None:
    check(ranks, tiny, layouts(tiny))


def test_the_sweep_covers_what_it_claims() -> None:
    every = {tiny: layouts(tiny) for tiny in MODELS}
    met = {
        (x.tp, x.dcp, x.pcp, x.interleave_size, x.block_size)
        for found in every.values()
        for x in found
    }
    for degrees in {(x.tp, x.dcp, x.pcp) for x in every[MODELS[0]]}:
        caches = {key[3:] for key in met if key[:3] == degrees}
        assert caches == set(CACHES), f"{degrees} does not meet {set(CACHES) - caches}"
    sampled = [x for i, t in enumerate(MODELS) for x in every[t][i::SAMPLE]]
    assert {(x.interleave_size, x.block_size) for x in sampled} == set(CACHES)
    assert {(x.combine, x.q_proj) for x in sampled} == set(
        itertools.product(COMBINES, ("gather", "tpa"))
    )
    assert {x.ranks for x in sampled} == set(range(1, 9))
    assert (8, 4, 1) in {(x.tp, x.dcp, x.pcp) for x in every[MODELS[0]]}
    assert len(every[MODELS[0]]) > 100
