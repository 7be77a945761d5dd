"""A drawing of each benchmark: time against context, a panel for each number of ranks."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.results import READ, Result, label_of, panels


def draw(result: Result, path: Path) -> None:
    """Write a PNG of medians and quartiles to ``path``."""
    shown = panels(result)
    figure = Figure(figsize=(1 + 4.2 * len(shown), 4.2), layout="constrained")
    axes = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    colours: dict[str, str] = {}
    for axis, (title, cases) in zip(axes, shown.items(), strict=True):
        series: dict[str, list[tuple[int, float, float, float]]] = {}
        for case in cases:
            for name in case.shown:
                timing = case.timings[name]
                point = case.at["keys"], *(s * 1e3 for s in (timing.median, *timing.quartiles))
                series.setdefault(label_of(name), []).append(point)
        for name, points in series.items():
            keys, median, first, third = zip(*points, strict=True)
            colour = colours.setdefault(name, f"C{len(colours)}")
            style = "--" if name.startswith(READ) else "-"
            axis.plot(keys, median, style, marker="o", markersize=3, color=colour, label=name)
            axis.fill_between(keys, first, third, color=colour, alpha=0.15, linewidth=0)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.xaxis.set_major_formatter(lambda keys, _: thousands(keys))
        axis.set_xlabel("keys")
        axis.set_title(title)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms")
    handles = {h.get_label(): h for axis in axes for h in axis.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(result.title)
    figure.savefig(path, dpi=110)


def thousands(keys: float) -> str:
    """65536 as "64K", 2**20 as "1M"."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if keys >= size:
            return f"{keys / size:g}{unit}"
    return f"{keys:g}"
