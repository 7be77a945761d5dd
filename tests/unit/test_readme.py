"""README and documentation do what they say: blocks run, commands exist, options compose.

Python blocks of a page run in order, in one namespace, on one rank. A block that begins with a file
name is a file of the page; commands that name such a file are run as they stand. Other commands
are checked: make targets, extras, scripts and Hydra options exist.
"""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# (\w+\.(?:py|yaml))\n")
TIMEOUT_S = 120


class Block(NamedTuple):
    """A fenced block; ``file`` is the name that it begins with, if any."""

    language: str
    text: str
    line: int
    file: str | None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    blocks = []
    for match in FENCE.finditer(text):
        named = FILE.match(match[2])
        line = text.count("\n", 0, match.start(2))
        blocks.append(Block(match[1], match[2], line, named[1] if named else None))
    return blocks


def commands_of(page: Path) -> list[list[str]]:
    lines = "".join(b.text for b in blocks_of(page) if b.language == "bash").splitlines()
    commands = [shlex.split(line, comments=True) for line in lines]
    inline = re.findall(r"`((?:make|pip|python) [^`]+)`", page.read_text(encoding="utf-8"))
    return [c for c in commands if c] + [shlex.split(line) for line in inline]


def files_of(page: Path) -> dict[str, str]:
    return {b.file: b.text for b in blocks_of(page) if b.file}


def make_model(folder: Path) -> None:
    """A tiny model with a tokenizer, at the address that the README uses."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<unk>", "The", "keeper", "lit", "the", "lamp"]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


@pytest.mark.parametrize("name", NAMES)
def test_python_blocks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch sets this variable when transformers' loader imports its compiler; undone afterwards.
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "unused"))
    page = ROOT / name
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks_of(page):
        if block.language == "python" and block.file is None:
            # Newlines in front: a traceback then shows the line of the page.
            exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)


def test_pages_have_blocks_to_run() -> None:
    counts = {n: sum(b.language == "python" for b in blocks_of(ROOT / n)) for n in NAMES}
    assert counts["README.md"] == 3
    for page in (
        "idea",
        "layouts",
        "hf",
        "mla",
        "own-stack",
        "hydra",
        "failure",
        "testing",
        "planning",
    ):
        assert counts[f"docs/{page}.md"] >= 1, page


@pytest.mark.parametrize("name", [n for n in NAMES if files_of(ROOT / n)])
def test_files_of_a_page_run_by_its_commands(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "unused"))
    page = ROOT / name
    files = files_of(page)
    for file, text in files.items():
        (tmp_path / file).write_text(text)
    if any("path/to/model" in text for text in files.values()):
        make_model(tmp_path / "path" / "to" / "model")
    commands = [c for c in commands_of(page) if files.keys() & set(c)]
    started = {word for command in commands for word in command} & files.keys()
    assert started == {file for file in files if file.endswith(".py")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}
    for command in commands:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        assert done.stdout, f"{command} prints nothing"


@pytest.mark.parametrize("name", NAMES)
def test_commands_exist(name: str) -> None:
    files = files_of(ROOT / name)
    for command in commands_of(ROOT / name):
        if command[0] == "make":
            check_make(command)
        elif command[:2] == ["pip", "install"]:
            check_install(command)
        elif command[0] == "cplayers":
            check_command_line(command)
        else:
            assert command[0] in ("python", "torchrun", "pytest"), command
            [script] = [word for word in command if word.endswith(".py")]
            assert script in files or (ROOT / script).is_file(), command


def check_make(command: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = [word for word in command[1:] if "=" not in word and word != "..."]
    for target in targets:
        assert re.search(rf"^{re.escape(target)}:", makefile, re.MULTILINE), command
    for variable in (word.partition("=")[0] for word in command[1:] if "=" in word):
        assert re.search(rf"^{variable} \?=", makefile, re.MULTILINE), command


def check_command_line(command: list[str]) -> None:
    """The command exists, and its arguments can be read."""
    from cplayers.cli.arguments import parse
    from cplayers.cli.main import COMMANDS

    assert command[1] in COMMANDS, command
    known = importlib.import_module(f"cplayers.cli.{command[1]}").COMMAND
    parse(command[2:], known.options, known.flags)


def check_install(command: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [extras] = re.findall(r"^\.\[(.+)\]$", command[-1])
    assert command[2] == "-e"
    assert set(extras.split(",")) <= project["optional-dependencies"].keys()


def test_overrides_of_the_example_compose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.global_hydra import GlobalHydra
    from hydra.utils import instantiate

    from cplayers.conf import register_configs

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "unused"))
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    spec = importlib.util.spec_from_file_location("example", ROOT / "examples" / "generate.py")
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "example", example)  # dataclasses look their module up
    spec.loader.exec_module(example)
    register_configs()
    ConfigStore.instance().store(name="generate_schema", node=example.GenerateConf)

    checked = 0
    for command in itertools.chain.from_iterable(commands_of(page) for page in PAGES):
        if "examples/generate.py" not in command:
            continue
        options = command[command.index("examples/generate.py") + 1 :]
        ranks = command[command.index("--nproc-per-node") + 1] if "torchrun" in command else "1"
        monkeypatch.setenv("WORLD_SIZE", ranks)
        # A sweep names several values, joined by commas.
        pairs = [option.split("=") for option in options if not option.startswith("--")]
        choices = [[f"{key}={value}" for value in values.split(",")] for key, values in pairs]
        with initialize_config_dir(str(ROOT / "examples"), version_base="1.3"):
            for overrides in itertools.product(*choices):
                cfg = compose("generate", list(overrides))
                assert instantiate(cfg.mesh).world_size == int(ranks), command
                checked += 1
        GlobalHydra.instance().clear()
    assert checked >= 6


def test_tables_of_layouts_are_valid() -> None:
    """Every (tp, dcp, pcp) of README and layouts.md, and the refusals that they imply."""
    from cplayers.errors import ConfigError
    from cplayers.mesh import Topology, validate

    def judge(kv_heads: int, degrees: tuple[int, ...], q_proj: str) -> None:
        validate(
            Topology(*degrees),
            num_heads={8: 32, 2: 16}[kv_heads],
            num_kv_heads=kv_heads,
            block_size=16,
            interleave_size=16,
            q_proj=q_proj,
        )

    def degrees_in(text: str) -> list[tuple[int, ...]]:
        found = re.findall(r"\((\d+), (\d+), (\d+)\)", text)
        return [tuple(int(degree) for degree in degrees) for degrees in found]

    seen = 0
    for line in (ROOT / "README.md").read_text().splitlines():
        if row := re.match(r"\| (\d) \| (\(.*); with TPA also (.*) \|$", line):
            for degrees in degrees_in(row[2]):
                judge(int(row[1]), degrees, "gather")
                seen += 1
            for degrees in degrees_in(row[3]):
                judge(int(row[1]), degrees, "tpa")
                with pytest.raises(ConfigError, match="q_proj='tpa'"):
                    judge(int(row[1]), degrees, "gather")
                seen += 1
    assert seen == 12

    seen = 0
    pattern = r"\| (\d) \| (\d+) \| \((\d+), (\d+), (\d+)\) \| (\w+) \| (\S+) \|"
    for kv, ranks, tp, dcp, pcp, q_proj, share in re.findall(
        pattern, (ROOT / "docs" / "layouts.md").read_text()
    ):
        judge(int(kv), (int(tp), int(dcp), int(pcp)), q_proj)
        assert int(tp) * int(pcp) == int(ranks)
        tpa = int(tp) // max(1, int(dcp) // int(pcp))
        width = tpa if q_proj == "tpa" else int(tp)
        stored = max(1, int(kv) // width)
        part = f"1/{int(kv) * int(dcp) // stored}"
        assert share == ("1" if part == "1/1" else part), (tp, dcp, pcp)
        seen += 1
    assert seen == 10
