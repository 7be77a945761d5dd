"""Topology against worked groups, and its algebra."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cplayers.errors import ConfigError
from cplayers.mesh import AXES, Coords, Topology

GOLD = json.loads((Path(__file__).parents[1] / "gold" / "topology.json").read_text())


@st.composite
def topologies(draw):
    tp, pcp, dp = (draw(st.integers(1, 6)) for _ in range(3))
    k = draw(st.sampled_from([k for k in range(1, tp + 1) if tp % k == 0]))
    return Topology(tp=tp, pcp=pcp, dp=dp, dcp=draw(st.sampled_from([1, pcp * k])))


def degrees(case):
    return {axis: case[axis] for axis in ("tp", "dcp", "pcp", "dp")}


@pytest.mark.parametrize("case", GOLD["topologies"], ids=lambda case: str(degrees(case)))
@pytest.mark.parametrize("axis", ["tp", "pcp", "dcp", "dp"])
def test_groups_equal_the_worked_ones(case, axis):
    assert Topology(**degrees(case)).groups(axis) == case["groups"][axis]


@pytest.mark.parametrize(
    ("topology", "tpa", "dcp_tp"),
    [
        (Topology(tp=4, dcp=2), [[0, 2], [1, 3]], [[0, 1], [2, 3]]),
        (Topology(tp=6, dcp=3), [[0, 3], [1, 4], [2, 5]], [[0, 1, 2], [3, 4, 5]]),
        (
            Topology(tp=4, dcp=4, pcp=2),
            [[0, 2], [1, 3], [4, 6], [5, 7]],
            [[0, 1], [2, 3], [4, 5], [6, 7]],
        ),
        (Topology(tp=2, dcp=1, pcp=2), [[0, 1], [2, 3]], [[0], [1], [2], [3]]),
        (Topology(tp=2, dcp=2, pcp=2), [[0, 1], [2, 3]], [[0], [1], [2], [3]]),
    ],
)
def test_head_sharding_groups(topology, tpa, dcp_tp):
    assert topology.groups("tpa") == tpa
    assert topology.groups("dcp_tp") == dcp_tp


@given(topologies(), st.sampled_from(AXES))
@settings(deadline=None)
def test_groups_partition_the_world(topology, axis):
    groups = topology.groups(axis)
    assert sorted(rank for group in groups for rank in group) == list(range(topology.world_size))
    assert {len(group) for group in groups} == {topology.size(axis)}
    assert [group[0] for group in groups] == sorted(group[0] for group in groups)


@given(topologies())
@settings(deadline=None)
def test_members_agree_on_their_groups_and_places(topology):
    for rank in range(topology.world_size):
        at = topology.coords(rank)
        assert rank == (at.dp * topology.pcp + at.pcp) * topology.tp + at.tp
        for axis in AXES:
            assert topology.group_of(rank, axis)[topology.rank_in(rank, axis)] == rank
        if topology.dcp > 1:
            # The place in a DCP group is tp-major, pcp-minor.
            assert topology.rank_in(rank, "dcp") == (
                at.tp % topology.dcp_tp * topology.pcp + at.pcp
            )
        # A tpa group meets each DCP group at most once, and always at the same place.
        places = {topology.rank_in(peer, "dcp") for peer in topology.group_of(rank, "tpa")}
        assert len(places) == 1


def test_coords():
    assert Topology(tp=2, pcp=3, dp=2).coords(9) == Coords(dp=1, pcp=1, tp=1)


@pytest.mark.parametrize("degree", [0, -1, 1.0, "2", None, True])
@pytest.mark.parametrize("axis", ["tp", "dcp", "pcp", "dp"])
def test_degrees_are_positive_ints(axis, degree):
    with pytest.raises(ConfigError, match=rf"{axis}={degree!r}.*at least 1.*{axis}=1"):
        Topology(**{axis: degree})


def test_impossible_dcp_is_refused_where_it_matters():
    topology = Topology(tp=4, dcp=3, pcp=2)
    assert topology.world_size == 8
    assert topology.groups("tp") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for use in (
        lambda: topology.dcp_tp,
        lambda: topology.tpa,
        lambda: topology.groups("dcp"),
        lambda: topology.groups("tpa"),
        lambda: topology.rank_in(0, "dcp_tp"),
    ):
        with pytest.raises(ConfigError, match=r"dcp=3 with tp=4, pcp=2.*\[1, 2, 4, 8\]"):
            use()


def test_unknown_axis_and_rank_are_refused():
    with pytest.raises(ConfigError, match=r"axis='cp'.*dcp_tp"):
        Topology().groups("cp")
    with pytest.raises(ConfigError, match=r"axis='world_size'"):
        Topology().size("world_size")
    with pytest.raises(ConfigError, match=r"rank=4.*0 to 3"):
        Topology(tp=4).group_of(4, "tp")
    with pytest.raises(ConfigError, match="rank=-1"):
        Topology(tp=4).coords(-1)
