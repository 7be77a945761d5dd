"""The Triton kernels on the CPU, under Triton's interpreter, in a process of its own.

Triton reads TRITON_INTERPRET when a kernel is defined, so this process cannot change its mind.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_cases import ATTENTION, MERGES, PACKS, WRITES

CASES = Path(__file__).parent / "kernels_interpreted.py"


@pytest.fixture(scope="module")
def report() -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CASES)],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        cwd=CASES.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"{done.stdout}\n{done.stderr}"


@pytest.mark.timeout(1200)  # the sum of what the cases may take
def test_all_cases_pass(report: str) -> None:
    counts = re.search(r"^(\d+) passed(.*) in ", report, re.MULTILINE)
    assert counts, report
    assert not counts[2], report
    assert int(counts[1]) == len(ATTENTION) + len(MERGES) + len(PACKS) + len(WRITES) + 7
