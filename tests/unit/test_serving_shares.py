"""Who rests, for how long, and how long a round lasts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cplayers.serving.shares import Shares

ALL, PAIR, ONE, OTHER = (0, 1, 2, 3), (0, 1), (0,), (2,)


def test_a_larger_group_rests_until_its_debt_is_paid() -> None:
    shares = Shares(0.25)
    shares.account({}, 0.0)
    assert shares.resting({ALL, ONE}) == set(), "it begins without a debt"
    shares.account({ALL: 0.6, ONE: 0.2}, 0.8)  # owes 0.6, of which a quarter of 0.8 is paid
    assert shares.resting({ALL, ONE}) == {ALL}
    shares.account({ONE: 0.1}, 2.3)  # 0.025 left
    assert shares.resting({ALL, ONE}) == {ALL}
    shares.account({ONE: 0.1}, 2.41)
    assert shares.resting({ALL, ONE}) == set()


def test_only_smaller_groups_on_its_own_replicas_make_it_rest() -> None:
    shares = Shares(0.1)
    for busy in ({ALL}, {PAIR, OTHER}, {ONE, OTHER}):
        assert shares.resting(busy) == set()
        shares.account(dict.fromkeys(busy, 1.0), 0.0)
        assert shares.resting(busy) == set()
    assert shares.resting({PAIR, ONE}) == set(), "what it took before counts for nothing"
    shares.account({PAIR: 1.0}, 0.0)
    assert shares.resting({PAIR, ONE}) == {PAIR}
    assert shares.resting({PAIR, OTHER}) == set(), "nobody waits for it any more"


def test_on_the_same_processors_all_smaller_groups_make_it_rest() -> None:
    shares = Shares(0.1, same_processors=True)
    assert shares.resting({PAIR, OTHER}) == set()
    shares.account({PAIR: 1.0, OTHER: 1.0}, 1.0)
    assert shares.resting({PAIR, OTHER}) == {PAIR}
    assert shares.resting({PAIR, (2, 3)}) == set(), "groups of one size do not wait for each other"


def test_a_round_lasts_as_long_as_its_busiest_replica() -> None:
    shares = Shares(1.0)
    assert shares.lasts({ALL, ONE}) == 0.0
    shares.account({ALL: 0.5, PAIR: 0.25, ONE: 0.125, OTHER: 0.5}, 1.0)
    assert shares.lasts({ALL, PAIR, ONE, OTHER}) == 1.0  # replica 2
    assert shares.lasts({PAIR, ONE, OTHER}) == 0.5
    assert shares.lasts({PAIR, ONE}) == 0.375
    assert shares.lasts(set()) == 0.0


@given(
    st.floats(0.05, 1.0),
    st.lists(st.floats(0.001, 0.3), min_size=1, max_size=20),
    st.floats(0.01, 0.2),
)
def test_in_the_long_run_it_gets_its_share(share: float, steps: list[float], other: float) -> None:
    """Rounds of a busy replica, of which each takes ``other`` and, unless it rests, a step more."""
    shares, now, mine, made = Shares(share), 0.0, 0.0, 0
    while now < 400.0:
        spent = {ONE: other}
        if ALL not in shares.resting({ALL, ONE}):
            spent[ALL] = steps[made % len(steps)]
            mine, made = mine + spent[ALL], made + 1
        now += sum(spent.values())
        shares.account(spent, now)
    mean = sum(steps) / len(steps)
    late = other / mean  # a round is not cut short, so that it may rest for one too long
    assert share / (1 + share * late) - 0.01 <= mine / now <= share + 0.01 or (
        mine / now == pytest.approx(mean / (mean + other), abs=0.01) and mine / now < share
    ), "it makes a step in every round at most"
