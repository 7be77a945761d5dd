"""A drawing of each benchmark: time against context, a panel for each number of ranks."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from benchmarks.results import READ, Result, group_of


def draw(result: Result, path: Path) -> None:
    """Write a PNG of medians and quartiles to ``path``."""
    panels = list(
        dict.fromkeys(
            tuple((label, value) for label, value in case.at.items() if label != "keys")
            for case in result.cases
        )
    )
    figure = Figure(figsize=(1 + 4.2 * len(panels), 4.2), layout="constrained")
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    colours: dict[str, str] = {}
    for axis, panel in zip(axes, panels, strict=True):
        cases = [
            c for c in result.cases if set(panel) == set(c.at.items()) - {("keys", c.at["keys"])}
        ]
        series: dict[str, list[tuple[int, float, float, float]]] = {}
        for case in cases:
            for name in case.shown:
                timing, shown = case.timings[name], name
                if name.startswith(READ):  # which of the group is fastest may change with size
                    shown = group_of(name)
                point = case.at["keys"], timing.median * 1e3, *(q * 1e3 for q in timing.quartiles)
                series.setdefault(shown, []).append(point)
        for name, points in series.items():
            keys, median, first, third = zip(*points, strict=True)
            colour = colours.setdefault(name, f"C{len(colours)}")
            style = "--" if name.startswith(READ) else "-"
            axis.plot(keys, median, style, marker="o", markersize=3, color=colour, label=name)
            axis.fill_between(keys, first, third, color=colour, alpha=0.15, linewidth=0)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("keys")
        axis.set_title(", ".join(f"{value:,} {label}" for label, value in panel) or "one process")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("ms")
    handles = {h.get_label(): h for axis in axes for h in axis.get_legend_handles_labels()[0]}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, fontsize=8)
    figure.suptitle(result.title)
    figure.savefig(path, dpi=110)
