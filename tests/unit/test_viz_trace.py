"""The picture of a serving run shows what the trace says."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from cplayers.viz.trace import COLOURS, WAITING, _draw_memory, _draw_requests, trace_png

TRACE = [
    {"event": "config", "num_blocks": 10},
    {"event": "arrive", "request": "a", "time": 0.0},
    {"event": "arrive", "request": "b", "time": 0.5},
    {"event": "refuse", "request": "b", "time": 0.5},
    {"event": "admit", "request": "a", "time": 1.0, "group": [0]},
    {"event": "usage", "time": 1.5, "replicas": [0, 1], "used": [3, 0]},
    {"event": "migrate", "request": "a", "time": 2.0, "group": [0, 1], "from": [0]},
    {"event": "lost", "time": 3.0, "replicas": [1]},
    {"event": "recompute", "request": "a", "time": 3.0, "group": [0, 1]},
    {"event": "usage", "time": 3.0, "replicas": [0], "used": [7]},
    {"event": "admit", "request": "a", "time": 4.0, "group": [0]},
    {"event": "finish", "request": "a", "time": 6.0, "group": [0]},
]


def test_each_request_is_a_row_of_where_it_was() -> None:
    axes = Figure().subplots()
    _draw_requests(axes, ["a", "b"], TRACE)
    bars = [
        (bar.get_x(), bar.get_width(), round(bar.get_y() + 0.4), to_hex(bar.get_facecolor()))
        for bar in axes.patches
        if bar.get_width()
    ]
    assert bars == [
        (0.0, 1.0, 0, WAITING),
        (1.0, 1.0, 0, COLOURS[1]),
        (2.0, 1.0, 0, COLOURS[2]),
        (3.0, 1.0, 0, WAITING),
        (4.0, 2.0, 0, COLOURS[1]),
    ]
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sorted(labels) == ["1 replica", "2 replicas", "moves", "waits"]


def test_memory_is_drawn_for_as_long_as_a_replica_lives() -> None:
    axes = Figure().subplots()
    _draw_memory(axes, TRACE)
    lines = {line.get_label(): list(map(float, line.get_ydata())) for line in axes.lines}
    assert lines == {"replica 0": [3, 7], "replica 1": [0], "budget": [10, 10]}


@pytest.mark.parametrize("lines", [TRACE, TRACE[:1]])
def test_a_picture_is_written(lines: list[dict], tmp_path: Path) -> None:
    trace_png(lines, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
