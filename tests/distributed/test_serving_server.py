"""Requests on replicas that share contexts where it pays get the tokens of a run alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from serving_cases import CONFIG, alone, requests, serve


@pytest.fixture(scope="module")
def given() -> list:
    return requests(3, seconds=0.0)  # all at once


@pytest.fixture(scope="module")
def expected(given) -> list[list[int]]:
    return [alone(request) for request in given]


def test_every_request_gets_the_tokens_of_a_run_alone(ranks, given, expected) -> None:
    config = replace(CONFIG, num_blocks=40, share=1.0, stretch=1)  # so that no clock decides
    results = ranks(4).run(serve, config, given, 4, n=4)
    done, trace = results[0]
    for other, log in results[1:]:
        assert other == done
        assert log == trace
    assert [new for new, *_ in done] == expected
    assert [count for *_, count in done] == [len(new) for new in expected]
    events = [line["event"] for line in trace]
    assert events.count("finish") == events.count("arrive") == len(given)
    assert events.count("migrate") >= 3
    assert max(max(line["used"]) for line in trace if line["event"] == "usage") <= config.num_blocks


@pytest.mark.parametrize(
    "sizes", [(1,), *(pytest.param((n,), marks=pytest.mark.slow) for n in (2, 4))], ids=str
)
def test_fixed_degrees_are_a_choice_of_sizes(ranks, given, expected, sizes) -> None:
    config = replace(CONFIG, sizes=sizes, crossovers={}, num_blocks=60)
    (done, _), *_ = ranks(4).run(serve, config, given, 4, n=4)
    assert [new for new, *_ in done] == expected
    assert {len(group) for _, _, history, _ in done for group in history} == set(sizes)


def test_one_replica_needs_no_process_group(given, expected) -> None:
    config = replace(CONFIG, sizes=(1,), crossovers={}, num_blocks=60)
    done, _ = serve(config, given, 1)
    assert [new for new, *_ in done] == expected


@pytest.mark.slow
def test_requests_that_arrive_over_time_in_little_memory(ranks) -> None:
    given = requests(3, count=40, seconds=2.0)
    results = ranks(4).run(serve, CONFIG, given, 4, n=4)
    assert all(result == results[0] for result in results)
    assert [new for new, *_ in results[0][0]] == [alone(request) for request in given]
