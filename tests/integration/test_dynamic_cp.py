"""The benchmark of dynamic context parallelism as a user starts it: 60 requests on four ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_sixty_requests_move_and_end_as_if_alone(tmp_path: Path) -> None:
    """The script itself compares every request's tokens, and the decisions of all ranks."""
    runs = ["cp=1", "dynamic, crossovers"]
    options = ["--seconds", "20", "--rounds", "1", "--dtype", "float64", "--out", str(tmp_path)]
    command = [sys.executable, "benchmarks/dynamic_cp.py", *options, "--runs", *runs]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "results.json").read_text())
    fixed, dynamic = (facts[name] for name in runs)
    assert (fixed["refused"], dynamic["refused"]) == (6, 0)
    assert dynamic["migrations"] >= 10
    assert dynamic["most_blocks"] <= dynamic["config"]["num_blocks"]
    tokens = dynamic["config"]["num_blocks"] * dynamic["config"]["block_size"]
    assert dynamic["kv_bytes"] == tokens * 3 * 2 * 2 * 16 * 8  # layers, planes, heads, dim, float64
    trace = (tmp_path / "dynamic-crossovers.jsonl").read_text()
    lines = [json.loads(line) for line in trace.splitlines()]
    assert sum(line["event"] == "finish" for line in lines) == 60
    assert (tmp_path / "dynamic-crossovers.png").read_bytes().startswith(b"\x89PNG")
