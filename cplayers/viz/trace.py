"""A picture of a serving run: where each request was when, and how full the replicas were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

COLOURS = {1: "#7fb07f", 2: "#e0a458", 4: "#c0392b", 8: "#6b4c9a"}
WAITING = "#c8ced4"
OTHER = "#4c6a92"


def trace_png(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the trace of a `cplayers.serving.Server`.

    Args:
        lines: The trace, e.g. ``server.trace`` or ``read_trace(...)``.
        path: File to write.
    """
    names = [line["request"] for line in lines if line["event"] == "arrive"]
    figure = Figure(figsize=(12, 2.4 + 0.14 * len(names)), layout="constrained")
    grid = figure.subplots(2, 1, sharex=True, height_ratios=(max(len(names), 12), 12))
    requests, memory = grid
    _draw_requests(requests, names, lines)
    _draw_memory(memory, lines)
    memory.set_xlabel("seconds")
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png")


def _draw_requests(axes: Axes, names: Sequence[str], lines: Sequence[Mapping[str, Any]]) -> None:
    row = {name: i for i, name in enumerate(names)}
    where: dict[str, tuple[float, int]] = {}  # since when, and in how many replicas; 0: waits
    sizes: set[int] = set()
    end = max((line["time"] for line in lines if "time" in line), default=0.0)
    for line in [*lines, *({"event": "finish", "request": name, "time": end} for name in names)]:
        name = line.get("request")
        if name is None:
            if line["event"] == "lost":
                axes.axvline(line["time"], color="black", linestyle=":")
            continue
        time, event = line["time"], line["event"]
        if name in where:
            since, size = where.pop(name)
            colour = COLOURS.get(size, OTHER) if size else WAITING
            axes.barh(row[name], time - since, left=since, height=0.8, color=colour)
        if event in ("migrate", "evict", "recompute", "refuse"):
            mark = {"migrate": ">", "evict": "x", "recompute": "x", "refuse": "_"}[event]
            axes.plot(time, row[name], mark, color="black", markersize=3)
        if event in ("arrive", "evict", "recompute", "postpone"):
            where[name] = time, 0
        elif event in ("admit", "migrate"):
            where[name] = time, len(line["group"])
            sizes.add(len(line["group"]))
    for size in sorted(sizes):
        axes.barh(0, 0, color=COLOURS.get(size, OTHER), label=f"{size} replica{'s' * (size > 1)}")
    axes.barh(0, 0, color=WAITING, label="waits")
    axes.plot([], [], ">", color="black", markersize=3, label="moves")
    axes.set_ylabel("requests, by arrival")
    axes.invert_yaxis()
    axes.legend(loc="upper right", fontsize="small")


def _draw_memory(axes: Axes, lines: Sequence[Mapping[str, Any]]) -> None:
    budget = next(line["num_blocks"] for line in lines if line["event"] == "config")
    usage = [line for line in lines if line["event"] == "usage"]
    for replica in sorted({replica for line in usage for replica in line["replicas"]}):
        points = [
            (line["time"], line["used"][line["replicas"].index(replica)])
            for line in usage
            if replica in line["replicas"]
        ]
        times, used = zip(*points, strict=True)
        axes.step(times, used, where="post", label=f"replica {replica}")
    axes.axhline(budget, color="#c0392b", linestyle="--", label="budget")
    axes.set_ylabel("KV blocks in use")
    axes.set_ylim(0, 1.4 * budget)
    axes.legend(loc="upper left", fontsize="small", ncols=9)
