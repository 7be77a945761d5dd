"""The trace of a run: one JSON object a line, the settings first and then what was decided."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_trace(path: str | os.PathLike[str], lines: Iterable[Mapping[str, Any]]) -> None:
    """Write a trace, such as ``server.trace``.

    Args:
        path: The file; one that exists is replaced.
        lines: Plain values.
    """
    Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_trace(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read what `write_trace` wrote.

    Args:
        path: The file.
    """
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
