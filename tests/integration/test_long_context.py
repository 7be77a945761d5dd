"""The benchmark of a long context, at a size that a test can afford."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from long_context import failures, measure, parse  # noqa: E402
from long_context_exact import Settings  # noqa: E402

TOKEN = (512 + 64) * 2  # bytes of a cached token in bf16
SMALL = Settings(
    tokens=20_000, ranks=4, combine=("a2a", "ag_rs", "ar"), steps=1, fill=8_192, seed=3
)


@pytest.fixture(scope="module")
def facts(ranks: Callable[[int], Any]) -> dict[str, Any]:
    return measure(SMALL, ranks(SMALL.ranks))


def test_every_way_is_within_the_error_of_one_rank(facts: dict[str, Any]) -> None:
    assert failures(facts) == []
    ways = [(run["decode"], run["combine"]) for run in facts["runs"]]
    assert ways == [(d, c) for d in ("gather_q", "replicate_q") for c in ("a2a", "ag_rs", "ar")]
    one, plain = facts["error"]["unsharded"], facts["error"]["plain_tp"]["layer"]
    assert 1e-4 < one["attention"] < 0.02, "that of bf16"
    assert 1e-4 < plain < 0.02
    for run in facts["runs"]:
        assert run["error"]["attention"] <= 2 * one["attention"], run
        assert run["error"]["layer"] <= 2 * plain, run
        assert run["alike"]
    wrong = facts["error"]["equal_weights"]
    assert wrong["attention"] > 20 * one["attention"], "a wrong merge is far from passing"
    assert wrong["layer"] > 20 * plain


def test_a_rank_holds_its_share(facts: dict[str, Any]) -> None:
    # 20,000 = 39 rounds of 4 * 128 and 32 tokens more, which are the first rank's.
    assert facts["memory"]["tokens"] == [39 * 128 + 32, *[39 * 128] * 3]
    assert facts["memory"]["used_bytes"] == [40 * 128 * TOKEN] * 4
    assert facts["memory"]["unsharded_bytes"] == 20_000 * TOKEN


def test_collectives_of_a_step(facts: dict[str, Any]) -> None:
    calls = [len(run["traffic"]) for run in facts["runs"]]
    assert calls == [3, 4, 4, 2, 3, 3]  # the last of each is o_proj's
    sent = {(run["decode"], run["combine"]): run["traffic"] for run in facts["runs"]}
    assert sent["gather_q", "a2a"][:2] == [
        ["dcp", "all_gather", 3 * 4 * TOKEN],
        ["dcp", "all_to_all", 3 * 4 * (512 * 2 + 4)],
    ]
    assert sent["replicate_q", "a2a"][:1] == [["dcp", "all_to_all", 3 * 4 * (128 * 2 + 4)]]
    json.dumps(facts)


def test_several_new_tokens_over_uneven_runs(ranks: Callable[[int], Any]) -> None:
    settings = Settings(
        tokens=3_001, new=3, ranks=4, heads=8, interleave=24, block=16, combine=("a2a",), steps=1
    )
    facts = measure(settings, ranks(settings.ranks))
    assert failures(facts) == []
    assert sum(facts["memory"]["tokens"]) == 3_001


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("runs", 1, "error", "layer"), 0.3, "gather_q, ag_rs: layer has error 3.00e-01"),
        (("runs", 0, "error", "attention"), float("nan"), "gather_q, a2a: attention has error nan"),
        (("runs", 2, "alike"), False, "gather_q, ar: the ranks' outputs differ"),
        (("runs", 3, "traffic"), [], "replicate_q, a2a: sent []"),
        (("error", "equal_weights", "layer"), 1e-4, "layer: merging with equal weights would"),
        (("memory", "tokens", 2), 5_200, "rank 2 holds 5200 tokens"),
        (("memory", "used_bytes", 1), 5_130 * TOKEN, "rank 1 holds 4992 tokens in"),
    ],
)
def test_failures_are_named(
    facts: dict[str, Any], path: tuple[Any, ...], value: object, words: str
) -> None:
    changed = copy.deepcopy(facts)
    *outer, last = path
    part: Any = changed
    for key in outer:
        part = part[key]
    part[last] = value
    assert any(words in line for line in failures(changed))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (
            ["--ranks", "3"],
            "ranks=3, heads=16: every one of at least 2 ranks projects as many heads",
        ),
        (["--ranks", "32"], "take ranks from [2, 4, 8, 16]"),
        (["--ranks", "1"], "take ranks from [2, 4, 8, 16]"),
        (["--tokens", "0"], "tokens=0"),
        (["--fill", "100"], "fill=100: a multiple of 128"),
        (["--json", "."], "--json .: a file in a folder that exists"),
        (["--json", "no/such/facts.json"], "a file in a folder that exists"),
        (["--combine", "sum"], "invalid choice: 'sum'"),
        (["--interleaves", "1"], "unrecognized arguments"),
    ],
)
def test_mistakes_are_refused(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        parse(argv)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_defaults_are_the_documented_layout() -> None:
    settings, path = parse([])
    assert (settings.tokens, settings.ranks, settings.heads) == (1_024_000, 16, 16)
    assert (settings.interleave, settings.block, settings.new) == (128, 128, 1)
    assert path is None


def test_the_command(tmp_path: Path) -> None:
    result = tmp_path / "facts.json"
    options = ["--tokens", "1500", "--ranks", "2", "--steps", "1", "--json", str(result)]
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "long_context.py"), *options, "--combine", "a2a"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "1,500 cached tokens and 1 new" in done.stdout
    assert "replicate_q, a2a" in done.stdout
    facts = json.loads(result.read_text())
    assert failures(facts) == []
    assert facts["settings"]["tokens"] == 1_500
