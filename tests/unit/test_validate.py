"""The judge against worked verdicts and against what its rules are for."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cplayers.errors import ConfigError
from cplayers.mesh import Topology, legal_dcp, validate

GOLD = json.loads((Path(__file__).parents[1] / "gold" / "topology.json").read_text())
SIZES = {"block_size": 16, "interleave_size": 1}


def topology_of(case):
    return Topology(tp=case["tp"], dcp=case["dcp"], pcp=case["pcp"])


def model_of(case):
    return {key: case[key] for key in ("num_heads", "num_kv_heads", "replicate_q")}


def accepts(topology, **model):
    try:
        validate(topology, **model, **SIZES)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("case", GOLD["verdicts"], ids=str)
def test_verdicts(case):
    assert accepts(topology_of(case), **model_of(case)) == case["ok"]


@pytest.mark.parametrize("case", [c for c in GOLD["verdicts"] if not c["ok"]], ids=str)
def test_a_refusal_names_value_rule_and_a_remedy_that_works(case):
    with pytest.raises(ConfigError) as caught:
        validate(topology_of(case), **model_of(case), **SIZES)
    error = caught.value
    assert str(error) == f"{error.value}: {error.rule}. Remedy: {error.remedy}."
    assert str(case["tp"]) in error.value
    assert re.search("multiple|divid|at most", error.rule)
    name, values = re.search(r"use (dcp|tp) from (\[[\d, ]+\])", error.remedy).groups()
    for value in json.loads(values):
        degrees = {"tp": case["tp"], "pcp": case["pcp"]} if name == "dcp" else {}
        assert accepts(Topology(**degrees, **{name: value}), **model_of(case))
    if "q_proj='tpa'" in error.remedy:
        assert accepts(topology_of(case), **{**model_of(case), "replicate_q": True})


@given(
    tp=st.integers(1, 12),
    pcp=st.integers(1, 3),
    dcp=st.integers(1, 24),
    num_heads=st.integers(1, 24),
    num_kv_heads=st.integers(1, 12),
    replicate_q=st.booleans(),
)
@settings(deadline=None, max_examples=300)
def test_accepted_exactly_when_heads_can_be_placed(
    tp, pcp, dcp, num_heads, num_kv_heads, replicate_q
):
    """Places every head by hand: the oracle knows nothing of the rules' arithmetic."""
    topology = Topology(tp=tp, dcp=dcp, pcp=pcp)
    verdict = accepts(
        topology, num_heads=num_heads, num_kv_heads=num_kv_heads, replicate_q=replicate_q
    )
    assert verdict == _placeable(topology, num_heads, num_kv_heads, replicate_q)


def dcp_groups(topology):
    try:
        return topology.groups("dcp")
    except ConfigError:
        return None


def _placeable(topology, num_heads, num_kv_heads, replicate_q):
    if num_heads % topology.tp or num_heads % num_kv_heads:
        return False
    if dcp_groups(topology) is None:
        return False
    width = topology.tpa if replicate_q else topology.tp
    # KV heads that shard i of `width` reads, as fractions of the heads: whole heads or one head.
    per_shard, group = num_heads // width, num_heads // num_kv_heads
    reads = [
        [head // group for head in range(i * per_shard, (i + 1) * per_shard)] for i in range(width)
    ]
    for heads in reads:
        counts = {heads.count(head) for head in set(heads)}
        if len(set(heads)) > 1 and counts != {group}:
            return False  # a KV head is cut between two shards that also hold others
    if replicate_q:
        return True
    # All ranks of a DCP group hold different tokens of the same KV heads.
    return topology.dcp_tp == 1 or all(
        len({tuple(set(reads[topology.coords(rank).tp])) for rank in ranks}) == 1
        and len(set(reads[topology.coords(ranks[0]).tp])) == 1
        for ranks in dcp_groups(topology)
    )


def test_legal_dcp():
    assert legal_dcp(Topology(tp=8), num_heads=64, num_kv_heads=4) == [1, 2]
    assert legal_dcp(Topology(tp=6), num_heads=12, num_kv_heads=2) == [1, 3]
    assert legal_dcp(Topology(tp=2, pcp=2), num_heads=8, num_kv_heads=2) == [1, 2]
    assert legal_dcp(Topology(tp=8), num_heads=128, num_kv_heads=None) == [1, 2, 4, 8]
    assert legal_dcp(Topology(tp=16), num_heads=64, num_kv_heads=8, replicate_q=True) == [
        1, 2, 4, 8, 16,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "argument", ["num_heads", "num_kv_heads", "block_size", "interleave_size", "window", "head_dim"]
)
@pytest.mark.parametrize("number", [0, -3, 1.5, "4", True])
def test_sizes_are_positive_ints(argument, number):
    with pytest.raises(ConfigError, match=rf"^{argument}={number!r}: .*at least 1.*Remedy: pass"):
        validate(Topology(), **{"num_heads": 4, **SIZES, argument: number})


@pytest.mark.parametrize(("argument", "choices"), [("combine", "a2a"), ("q_proj", "tpa")])
def test_choices(argument, choices):
    validate(Topology(), num_heads=4, **SIZES, **{argument: choices})
    with pytest.raises(ConfigError, match=rf"{argument}='foo'.*{choices}"):
        validate(Topology(), num_heads=4, **SIZES, **{argument: "foo"})


def test_q_proj_tpa_means_replicated_queries():
    topology = Topology(tp=16, dcp=4)
    validate(topology, num_heads=64, num_kv_heads=8, q_proj="tpa", **SIZES)
    with pytest.raises(ConfigError, match="q_proj='tpa'"):
        validate(topology, num_heads=64, num_kv_heads=8, q_proj="gather", **SIZES)
    with pytest.raises(ConfigError, match="not gathered"):
        validate(topology, num_heads=64, num_kv_heads=8, q_proj="gather", replicate_q=True, **SIZES)


def test_any_interleave_goes_with_any_block():
    for interleave in (1, 3, 16, 40):
        validate(
            Topology(tp=2, dcp=2), num_heads=4, num_kv_heads=1, block_size=16,
            interleave_size=interleave, window=4, head_dim=8,
        )  # fmt: skip
