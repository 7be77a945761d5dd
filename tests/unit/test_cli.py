"""The ``cplayers`` command: what it prints, what it refuses, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cplayers import ConfigError, InterleavedLayout, ZigzagLayout, __version__
from cplayers.cli import verify
from cplayers.cli.arguments import count, duration, fraction, parse
from cplayers.cli.command import show_json
from cplayers.cli.main import COMMANDS, main
from cplayers.cli.output import blocks, width
from cplayers.cli.verify import largest_error
from cplayers.planning.advice import seconds
from cplayers.planning.calibrate import _known
from cplayers.planning.placement import runs, shares

PLAN = ["plan", "model=deepseek-v3", "hardware=h200", "gpus=8", "context=1M", "concurrency=4"]
PNG_HEADER = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command: exit code, output and errors."""

    def run(*words: str) -> tuple[int, str, str]:
        code = main(words)
        return code, *capsys.readouterr()

    return run


def test_help_has_examples_that_are_understood(command: Any) -> None:
    code, text, _ = command("--help")
    assert code == 0
    assert all(f"  {name}" in text for name in COMMANDS)
    assert command()[0] == 2
    for name in COMMANDS:
        code, own, errors = command(name, "--help")
        assert code == 0 and errors == ""
        examples = [line.strip() for line in own.splitlines() if f"  cplayers {name} " in line]
        assert examples, name
        own_command = import_module(f"cplayers.cli.{name}").COMMAND
        for line in examples:
            parse(line.split()[2:], own_command.options, own_command.flags)


def test_help_comes_without_torch() -> None:
    probe = (
        "import sys; from cplayers.cli.main import main; code = main(['plan', '--help']);"
        "assert 'torch' not in sys.modules; assert main(['plan', 'gpus=0']) == 2;"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_plan_of_the_readme(command: Any, tmp_path: Path) -> None:
    picture = tmp_path / "plan.png"
    code, text, errors = command(*PLAN, "--png", str(picture))
    assert (code, errors) == (0, "")
    assert "Run tp=8, dcp=8, pcp=1." in text
    assert "Predicted, not measured" in text and "TTFT*" in text
    assert "One sequence outgrows a card" in text and "73.7 GB" in text
    assert picture.read_bytes().startswith(PNG_HEADER)


def test_the_plan_as_json(command: Any) -> None:
    code, text, _ = command(*PLAN, "--json", "weights=bf16")
    data = json.loads(text)
    assert code == 1  # 671 billion weights of two bytes do not fit on 8 cards
    assert data["recommended"] is None and data["reasons"][0].startswith("Nothing fits")
    assert data["weights"] == "bf16"
    assert data["load"] == {"context": 1 << 20, "concurrency": 4, "output": 1024, "chunk": 8192}
    layouts = {(d["tp"], d["dcp"], d["pcp"], d["dp"], d["q_proj"]): d for d in data["layouts"]}
    assert len(layouts) == len(data["layouts"]) > 20
    assert layouts[8, 8, 1, 1, "gather"]["kv_bytes_per_sequence"] == 9_210_691_584
    assert layouts[8, 1, 1, 1, "gather"]["kv_bytes_per_sequence"] == 73_685_532_672
    assert all(d["predicted"]["ttft_s"] > 0 for d in data["layouts"])
    assert data["hardware"]["source"]


def test_assumptions_can_be_set(command: Any) -> None:
    def tpot(*words: str) -> float:
        data = json.loads(command(*PLAN, "--json", *words)[1])
        assert data["recommended"] is not None
        return float(data["recommended"]["predicted"]["tpot_s"])

    assert tpot("memory=0.4", "compute=0.25") == pytest.approx(2 * tpot(), rel=0.2)
    assert tpot("latency=1ms") > 10 * tpot()


def test_explain(command: Any, tmp_path: Path) -> None:
    picture = tmp_path / "placement.png"
    words = ("explain", "tokens=22", "pcp=4", "dcp=4", "interleave=2", "block=4")
    code, text, errors = command(*words, "--png", str(picture))
    assert (code, errors) == (0, "")
    assert "Tokens by rank: 6, 6, 6, 4." in text and "29.6%" in text
    assert picture.read_bytes().startswith(PNG_HEADER)
    data = json.loads(command(*words, "--json")[1])
    assert data["groups"]["dcp"] == [[0, 1, 2, 3]]
    assert data["cache"][4] == {"first": 8, "last": 9, "rank": 0, "block": 0, "slot": 2}
    assert [share["work"] for share in data["prompt"]] == [28, 75, 75, 75]


@given(
    ranks=st.integers(1, 5),
    interleave=st.integers(1, 7),
    block=st.integers(1, 6),
    length=st.integers(1, 120),
)
def test_every_token_is_explained_once_where_it_lives(
    ranks: int, interleave: int, block: int, length: int
) -> None:
    found = runs(InterleavedLayout(ranks, interleave, block), length)
    held = [0] * ranks
    expected = []
    for pos in range(length):  # token by token, from the definition
        rank = (pos // interleave) % ranks
        expected.append((pos, rank, held[rank] // block, held[rank] % block))
        held[rank] += 1
    assert expected == [
        (pos, run.rank, run.block, run.slot + pos - run.first)
        for run in found
        for pos in range(run.first, run.last + 1)
    ]
    split = shares(ZigzagLayout(ranks, length))
    chunks = [chunk for share in split for chunk in (share.early, share.late) if chunk]
    assert sorted(pos for a, b in chunks for pos in range(a, b + 1)) == list(range(length))
    assert sum(share.work for share in split) == length * (length + 1) // 2
    for share in split:
        own = [c for c in (share.early, share.late) if c]
        assert share.tokens == sum(b - a + 1 for a, b in own)
        assert share.work == sum(pos + 1 for a, b in own for pos in range(a, b + 1))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan"], "no model: model is needed. Remedy: pass model="),
        (["pln"], "command 'pln': commands are plan, explain, verify, calibrate"),
        (["plan", "gpu=8"], "gpu: not an argument of this command. Remedy: write gpus"),
        (["plan", "--jsn"], "--jsn: not an argument of this command. Remedy: write --json"),
        (["plan", "gpus"], "gpus: arguments are key=value. Remedy: pass gpus="),
        (["plan", "gpus=8", "gpus=9"], "gpus given twice"),
        (["plan", "gpus=eight"], "gpus=eight: gpus is a whole number of at least 1"),
        (["plan", "--png"], "--png: it wants a value. Remedy: pass --png PATH"),
        (["plan", "--json=1"], "--json=1: --json takes no value"),
        ([*PLAN, "model2=x"], "model2: not an argument of this command. Remedy: write model"),
        ([*PLAN[:1], "model=gpt9", *PLAN[2:]], "model=gpt9: a model is a preset, or"),
        ([*PLAN, "weights=int3"], "weights=int3: weights are counted in a known precision"),
        ([*PLAN, "combine=sum"], "combine='sum': partial outputs are combined in one of"),
        ([*PLAN, "kv=fp8"], "kv=fp8: kv is one of bf16, fp16, fp32"),
        (
            [*PLAN, "--png", "no/where.png"],
            "--png no/where.png: a picture is put into a folder that exists. Remedy: make no first",
        ),
        (["explain", "tp=4", "dcp=3"], "dcp=3 with tp=4, pcp=1: dcp is 1, or pcp * k"),
        (["explain", "tokens=49", "--png", "x.png"], "tokens=49 in a picture: at most 48 cells"),
        (["verify", "tp=2"], "no model and no heads: a layout is right or wrong for a number"),
        (["verify", "model=llama-3-8b", "heads=4"], "model together with heads or kv_heads"),
        (["verify", "model=llama-3-70b", "tp=8", "dcp=2"], "or q_proj='tpa'"),
        (["verify", "heads=128", "tp=128"], "128 ranks: at most 64 processes"),
        (["verify", "heads=4", "q_proj=no"], "q_proj=no: q_proj is one of gather, tpa"),
        (["calibrate", "device=cuda"], "device=cuda without torchrun"),
        (["calibrate", "file=/proc/x/y"], "calibrations in /proc/x/y: it cannot be written"),
        ([*PLAN, "latency=infs", "--json"], "latency=infs: latency is a time above 0"),
        ([*PLAN, "output=" + "9" * 5000], "9...: output is at most 1,099,511,627,776"),
        ([*PLAN[:3], "gpus=9999999999999", *PLAN[4:]], "gpus=9999999999999: gpus is at most"),
        ([*PLAN, "compute=1e-320"], "compute=1e-320: compute is a number above 0"),
        ([*PLAN, "--png", "plan.txt"], "--png plan.txt: pictures are PNG files"),
        (["plan", "model=/bin/ls", *PLAN[2:]], "model=/bin/ls: it is not JSON"),
        (["verify", "heads=4", "seed=99999999999999999999"], "seed is at most"),
        (["explain", "tp=1024", "pcp=1024"], "1,048,576 ranks: groups of at most 16,384 ranks"),
        (["explain", "tokens=1G"], "tokens=1G: tokens is at most 4,194,304"),
        (
            ["explan", "tokens=1"],
            "command 'explan': commands are plan, explain, verify, calibrate. ",
        ),
        ([*PLAN, "-json"], "-json: not an argument of this command. Remedy: write --json"),
        ([*PLAN, "--png", ""], "--png: it wants a value. Remedy: pass --png PATH"),
        ([*PLAN[:4], "context=1MB"], "context is a whole number of at least 1, or one with K, M"),
        (["calibrate", "tp=1024"], "1024 ranks: at most 64 processes are started"),
        (["calibrate", "tp=2", "model=gpt9"], "model=gpt9: a model is a preset"),
        (["calibrate", "file=/tmp"], "calibrations in /tmp: they are kept in a JSON file"),
    ],
    ids=" ".join,
)
def test_mistakes_are_one_line_with_the_remedy(
    command: Any, words: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, printed, errors = command(*words)
    assert (code, printed) == (2, "")
    assert message in errors and "Remedy: " in errors
    assert errors.startswith(f"cplayers {words[0]}: ") and errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_version_and_the_help_of_a_command(command: Any) -> None:
    assert command("--version") == (0, f"cplayers {__version__}\n", "")
    assert command("help", "plan") == command("plan", "--help")
    assert command("explan")[2].endswith("Remedy: write explain.\n")


def started(*words: str, **more: Any) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-m", "cplayers.cli", *words]
    return subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, **more)


def test_a_reader_that_leaves_is_no_error() -> None:
    with started(*PLAN, "--all", stdout=subprocess.PIPE) as running:
        assert running.stdout is not None and running.stderr is not None
        assert running.stdout.readline().startswith("deepseek-v3 on 8 x h200")
        running.stdout.close()
        assert running.stderr.read() == ""
    assert running.returncode == 0


def test_a_full_disk_is_one_line() -> None:
    with open("/dev/full", "w") as full, started("--help", stdout=full) as running:
        _, errors = running.communicate()
    assert running.returncode == 2 and errors.count("\n") == 1
    assert errors.startswith("cplayers --help: No space left on device: ")


def test_letters_that_a_terminal_lacks_are_escaped() -> None:
    with started("explain", "gr\u00f6\u00dfe=1", env={"PYTHONIOENCODING": "ascii"}) as running:
        _, errors = running.communicate()
    assert running.returncode == 2 and errors.count("\n") == 1
    assert errors.startswith("cplayers explain: gr\\xf6\\xdfe: not an argument")
    assert seconds(2e-5) == "20 us" and duration("latency", "20us") == pytest.approx(2e-5)


@pytest.mark.parametrize("room", [20, 40, 60, 80])
def test_tables_become_blocks_where_a_terminal_is_narrow(room: int) -> None:
    columns = ["layout", "fits", "weights", "longest context*"]
    rows = [["tp=8, dcp=8", "yes", "86.7 GB", "1,117,696"], ["tp=4, dcp=4", "no", "1 GB", "0"]]
    # by hand: 11 + 4 + 7 + 16 letters, two blanks and a rule for each column, a rule at the end
    assert width(columns, rows) == 38 + 4 * 3 + 1
    lines = blocks("deepseek-v3 on 8 x h200", columns, rows, [0], room)
    assert max(map(len, lines)) <= max(room, len("    longest context*: 1,117,696"))
    text = " ".join(" ".join(lines).split())
    assert text.startswith("deepseek-v3 on 8 x h200 > layout: tp=8, dcp=8 fits: yes, weights: 86.7")
    assert text.endswith("- layout: tp=4, dcp=4 fits: no, weights: 1 GB, longest context*: 0")


def test_unforeseen_errors_are_one_line(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from cplayers.cli import explain

    def broken(values: Any) -> int:
        raise TypeError("of two\nlines")

    monkeypatch.setattr(explain, "COMMAND", explain.COMMAND._replace(run=broken))
    code, _, errors = command("explain")
    assert code == 2 and errors.count("\n") == 1
    assert errors.startswith("cplayers explain: TypeError: of two lines: nothing foresaw this.")
    monkeypatch.setenv("CPLAYERS_DEBUG", "1")
    with pytest.raises(TypeError, match="of two"):
        main(["explain"])


def test_infinity_is_not_json() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        show_json({"x": float("inf")})


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE without RANK: ranks that were started have"),
        ({"WORLD_SIZE": "3", "RANK": "0"}, "WORLD_SIZE=3 with Topology(tp=2"),
        ({"WORLD_SIZE": "2", "RANK": "x"}, "RANK=x: RANK is a number"),
    ],
)
def test_half_an_environment_is_refused(
    command: Any, environment: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(environment) > 1:
        environment = {**environment, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    code, _, errors = command("calibrate", "tp=2")
    assert code == 2 and message in errors and errors.count("\n") == 1


def test_ranks_without_a_device_of_their_own_are_refused(
    command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    names = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"}
    for name, value in {**names, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    code, _, errors = command("calibrate", "tp=2", "device=cuda")
    assert code == 2 and errors.count("\n") == 1
    assert "LOCAL_RANK=1 with device=cuda: each rank has a device of its own" in errors


def test_files_of_other_figures_are_not_calibrations(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    kept = {**dict.fromkeys(("key", "axis", "measured"), ""), "flops": 1, "memory_bandwidth": 1}
    file.write_text(json.dumps({"a": {**kept, "links": {}}, "b": 5, "c": {**kept, "flops": 0}}))
    assert _known(file, "a") is not None and _known(file, "z") is None
    for key in "bc":
        with pytest.raises(ConfigError, match="in a JSON file of calibrations"):
            _known(file, key)


def test_sizes_and_times() -> None:
    assert count("x", "1M") == 1_048_576 and count("x", "128k") == 131_072
    assert count("x", "1_000") == count("x", "1,000") == 1000
    assert duration("x", "2s") == 2 and duration("x", "500ms") == 0.5
    assert duration("x", "20us") == pytest.approx(20e-6)
    assert fraction("x", "0.9") == 0.9
    for read, texts in (
        (count, ["0", "-1", "1.5", "M", "1MM"]),
        (duration, ["2", "s", "0s", "-1ms"]),
        (fraction, ["0", "1.1", "x", "nan"]),
    ):
        for text in texts:
            with pytest.raises(ConfigError, match=f"x={text}"):
                read("x", text)


def test_verify_runs_the_layout(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("verify", "heads=4", "kv_heads=2", "pcp=2", "dcp=2", "interleave=3", "block=4")
    code, text, errors = command(*words)
    assert (code, errors) == (0, "")
    assert "It is right." in text and "a chunk of a prompt, and decode" in text
    # the same steps, judged by a bound that nothing meets: float32 travels
    monkeypatch.setattr(verify, "TOLERANCE", 0.0)
    code, text, _ = command(*words, "--json")
    data = json.loads(text)
    assert code == 1 and data["right"] is False
    assert max(step["largest_error"] for step in data["steps"]) < 1e-6
    assert all(sum(step["bytes_sent"]) > 0 for step in data["steps"])


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["model=llama-3-70b", "tp=8", "dcp=2", "q_proj=tpa"],
        ["model=deepseek-v3", "tp=4", "pcp=2", "dcp=4", "combine=ag_rs", "prefill=gather_q"],
        ["model=deepseek-v3", "tp=4", "dcp=4", "q_proj=tpa"],
        ["model=gpt-oss-20b", "tp=2", "pcp=2", "dcp=2", "dp=2", "prefill=ring"],
        ["heads=6", "tp=3", "pcp=2", "dcp=2", "combine=ar", "interleave=5", "block=3"],
        ["heads=6", "kv_heads=latent", "tp=6", "dcp=6"],
    ],
    ids=" ".join,
)
def test_verify_runs_all_kinds_of_layouts(command: Any, words: list[str]) -> None:
    code, text, errors = command("verify", *words)
    assert (code, errors) == (0, ""), text


def test_differences_and_nan_are_found() -> None:
    import torch

    from cplayers.cli.trial import Step

    exact = torch.tensor([[[1.0, -4.0]]])
    right, off = Step(exact, 0), Step(exact + torch.tensor([0.0, 1.0]), 0)
    assert largest_error([right, right], right) == 0
    assert largest_error([right, off], right) == 0.25
    assert largest_error([right, Step(exact * float("nan"), 0)], right) == float("inf")


def test_calibrate_is_kept_in_a_file(command: Any, tmp_path: Path) -> None:
    file = tmp_path / "calibration.json"
    words = ("calibrate", "pcp=2", "dcp=2", f"file={file}")
    code, text, errors = command(*words)
    assert (code, errors) == (0, "")
    assert str(file) in text and "dcp=2 beats dcp=1 when decoding" in text
    before = file.read_text()
    started = time.perf_counter()
    data = json.loads(command(*words, "--json")[1])
    assert file.read_text() == before, f"measured again, in {time.perf_counter() - started:.1f} s"
    [kept] = json.loads(before).values()
    assert {**data["measured"], "links": None} == pytest.approx({**kept, "links": None})
    assert data["measured"]["axis"] == "dcp"
    links = data["measured"]["links"]
    assert {
        "all_gather",
        "all_to_all",
        "reduce_scatter",
        "all_reduce",
        "a2a",
        "ag_rs",
        "ar",
    } == set(links)
    assert all(link["latency_s"] > 0 and link["bandwidth"] > 0 for link in links.values())
    assert data["predicted"]["crossovers"].keys() == {"dcp", "gather_q", "a2a", "chunk"}
