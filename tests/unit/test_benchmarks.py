"""The benchmarks run, compare answers before they time them, and report what they measured."""

from __future__ import annotations

import io
import json
import sys
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf
from rich.console import Console

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import contexts, peers, report  # noqa: E402
from benchmarks.bench import Bench, WrongAnswerError  # noqa: E402
from benchmarks.measure import Budget, Timing, schedule, take_turns  # noqa: E402
from benchmarks.results import Bar, Case, Result, from_json, to_json  # noqa: E402
from benchmarks.settings import Settings, register  # noqa: E402
from benchmarks.sites import Contestant, Here  # noqa: E402
from benchmarks.suite import MODULES, most_ranks, run_suite  # noqa: E402
from cplayers import ConfigError, GQASpec, InterleavedLayout  # noqa: E402


def settings(*overrides: str) -> Settings:
    register()
    with initialize_config_dir(str(ROOT / "benchmarks" / "conf"), version_base="1.3"):
        config = OmegaConf.to_object(compose("bench", list(overrides)))
    assert isinstance(config, Settings)
    return config


def sections(config: Settings) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.benchmarks}


@pytest.mark.parametrize("scale", ["full", "quick"])
def test_a_scale_measures_the_sizes_of_its_bars(scale: str) -> None:
    config = settings(f"scale={scale}")
    assert config.benchmarks == list(MODULES)
    for name, section in sections(config).items():
        for of in ("keys", "tokens", "ranks"):
            if hasattr(section, f"bar_{of}"):
                assert getattr(section, f"bar_{of}") in getattr(section, of), name


def test_the_full_scale_has_the_sizes_that_were_asked_for() -> None:
    config = settings()
    for section in (config.local_decode, config.dcp_decode, config.mla_decode):
        assert (section.keys[0], section.keys[-1]) == (1 << 10, 1 << 18)
    assert config.dcp_decode.ranks == [1, 2, 4]
    assert most_ranks(config) == 4


def test_settings_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigCompositionException, match="key_count"):
        settings("local_decode.key_count=3")
    with pytest.raises(ConfigError, match=r"no benchmark speed.*choose from local_decode"):
        run_suite(settings("benchmarks=[speed]"))


def test_turns_are_spread_evenly() -> None:
    order = list(schedule({"often": 12, "rarely": 3}))
    assert Counter(order) == {"often": 12, "rarely": 3}
    places = [i for i, name in enumerate(order) if name == "rarely"]
    assert all(4 <= b - a <= 6 for a, b in pairwise(places)), order


def test_repeats_fit_the_budget_within_its_limits() -> None:
    budget = Budget(seconds=2.0, bar_seconds=4.0, min_repeats=3, max_repeats=50)
    assert [budget.repeats(s, bar=False) for s in (10.0, 0.1, 1e-6)] == [3, 20, 50]
    assert budget.repeats(0.1, bar=True) == 40
    calls = Counter[str]()

    def contestant(name: str) -> float:
        calls[name] += 1
        return {"slow": 1.0, "fast": 0.1}[name]

    contestants = {name: partial(contestant, name) for name in ("slow", "fast")}
    timings = take_turns(contestants, partial(budget.repeats, bar=False), contestant)
    assert {name: len(t.seconds) for name, t in timings.items()} == {"slow": 3, "fast": 20}
    assert calls == {"slow": 4, "fast": 21}  # one to warm up


def test_medians_and_quartiles() -> None:
    timing = Timing([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (timing.median, timing.quartiles) == (3.0, (2.0, 4.0))
    assert timing.spread == pytest.approx(2 / 3)


def test_a_wrong_answer_is_not_timed() -> None:
    timed: list[str] = []

    def build() -> dict[str, Contestant]:
        right = torch.arange(4.0)
        return {
            "right": Contestant(lambda: timed.append("right"), lambda _: right),
            "wrong": Contestant(lambda: timed.append("wrong"), lambda _: right + 1e-3),
        }

    bench = Bench(pool=None, budget=Budget(0, 0, 1, 1), threads=1, tell=lambda _: None)  # type: ignore[arg-type]
    with pytest.raises(WrongAnswerError, match=r"5 keys, 'wrong' differs from 'right' by 0\.00033"):
        bench.case({"keys": 5}, [Here(1, build)], "right")
    assert timed == ["right", "wrong"]  # once each, for the answers


def test_shuffled_blocks_hold_the_same_context() -> None:
    spec, layout = GQASpec(2, 4), InterleavedLayout(1, 4, 4)
    near, far = (contexts.filled(spec, layout, 400, shuffled=s) for s in (False, True))
    for cache in (near, far):
        cache.commit(contexts.one_token(cache))
    table = torch.tensor(far.block_table(contexts.SEQ))
    assert sorted(table.tolist()) == list(range(100))
    assert int((table.diff() == 1).sum()) < 10
    assert near.block_table(contexts.SEQ) == tuple(range(100))
    for consecutive, shuffled in zip(contexts.planes(near), contexts.planes(far), strict=True):
        blocks = shuffled.unflatten(1, (100, 4))[:, table]
        # but for the last token, which nobody has written
        torch.testing.assert_close(blocks.flatten(1, 2)[:, :-1], consecutive[:, :-1])
        assert consecutive[:, :-1].abs().amin(-1).min() > 0


def test_reads_read_everything() -> None:
    tensors = [torch.randn(2, 8, 4), torch.randn(3, 4)]
    found = {name.partition(", ")[2]: read.run() for name, read in contexts.reads(tensors).items()}
    for i, tensor in enumerate(tensors):
        torch.testing.assert_close(found["sum"][i], tensor.sum())
        torch.testing.assert_close(found["largest"][i], tensor.max())
        torch.testing.assert_close(found["times ones"][i].sum(), tensor.sum())
        assert found["sum as int64"][i] == tensor.view(torch.int64).sum()


def example() -> Result:
    timings = {
        "a": Timing([2.0, 4.0, 3.0]),
        "plain read, x": Timing([1.5]),
        "plain read, y": Timing([2.0]),
    }
    case = Case({"keys": 64, "ranks": 2}, timings, "plain read, x", {"peer": "is not installed"})
    bars = [Bar("a over a read", case.ratio("a"), 1.9), Bar("b", 3.0, 3.0, at_least=True)]
    return Result("example", "An example", [case], [*bars, Bar("c", None, 1.0)], 1.0)


def test_bars_pass_fall_short_or_are_not_measured() -> None:
    assert [bar.verdict for bar in example().bars] == ["short", "pass", "not measured"]
    case = example().cases[0]
    assert case.ratio("a") == 2.0
    case.add_rates({"a": 6e9, "plain read": 3e9}, "B")
    assert case.notes == {
        "peer": "is not installed",
        "a": "2 GB/s",
        "plain read, x": "2 GB/s",
        "plain read, y": "1.5 GB/s",
    }
    assert case.shown == ["a", "plain read, x"]


def test_results_survive_json() -> None:
    data = json.loads(json.dumps(to_json(example())))
    assert from_json(data) == example()
    assert data["cases"][0]["timings"]["a"]["median"] == 3.0
    assert [bar["verdict"] for bar in data["bars"]] == ["short", "pass", "not measured"]


def test_the_page_is_filled_between_its_marks(tmp_path: Path) -> None:
    machine = {"cpu": "CPU", "cores": 2, "threads": 2, "python": "3", "date": "2026-01-02T03:04"}
    data = {"machine": machine | {"versions": {"torch": "2"}}, "benchmarks": [to_json(example())]}
    page = "Text.\n<!-- bars -->\nold\n<!-- end -->\n<!-- other -->\nkept\n<!-- end -->\n"
    blocks = report.markdown(data, tmp_path)
    filled = report.fill(page, blocks)
    assert "| a over a read | 2x | <= 1.9x | short |" in filled
    assert "old" not in filled and "<!-- other -->\nkept\n<!-- end -->" in filled
    assert report.fill(filled, blocks) == filled
    assert blocks["example"].splitlines() == [
        "2 ranks, ms (ratio over plain read):",
        "",
        "| keys | a | plain read |",
        "|---|---|---|",
        "| 64 | 3,000 (2) | 1,500 (1) |",
    ]
    (tmp_path / "bench-example.png").touch()
    drawn = report.markdown(data, tmp_path)["example"]
    assert drawn.endswith("![An example](images/bench-example.png)")


def small_run(ranks: Callable[[int], Any], out: Path, *overrides: str) -> str:
    config = settings("scale=quick", f"out={out}", *overrides)
    console = Console(file=io.StringIO(), width=200)
    results = run_suite(config, ranks(most_ranks(config)).pool, console)
    written = json.loads((out / "results.json").read_text())
    assert [result["name"] for result in written["benchmarks"]] == config.benchmarks
    assert written["machine"]["versions"]["torch"] == torch.__version__
    for result in results:
        assert (out / f"{result.name}.png").read_bytes().startswith(b"\x89PNG")
        for case in result.cases:
            assert all(seconds > 0 for t in case.timings.values() for seconds in t.seconds)
        expected = {"pass", "short"} if not any(b.why for b in result.bars) else {"not measured"}
        assert expected & {bar.verdict for bar in result.bars} or not result.bars
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_some_run(ranks: Callable[[int], Any], tmp_path: Path) -> None:
    few = ("dcp_decode.ranks=[2]", "dcp_decode.keys=[256]", "local_decode.keys=[256]")
    text = small_run(ranks, tmp_path, "benchmarks=[local_decode,dcp_decode]", *few)
    for part in ("cplayers, shuffled blocks", "plain read", "256", "<= 1.35x"):
        assert part in text


@pytest.mark.slow
def test_all_run(ranks: Callable[[int], Any], tmp_path: Path) -> None:
    text = small_run(ranks, tmp_path)
    for module in MODULES.values():
        assert module.TITLE in text


def test_a_missing_peer_is_said_and_left_out(
    ranks: Callable[[int], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "has_lucidrains", lambda: False)
    overrides = ("benchmarks=[prefill]", "prefill.ranks=[2]", "prefill.tokens=[256]")
    config = settings("scale=quick", "out=null", *overrides)
    console = Console(file=io.StringIO(), width=200)
    run_suite(config, ranks(2).pool, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count("ring-attention-pytorch is not installed: pip install '.[bench]'") == 3
    assert "not measured" in text
