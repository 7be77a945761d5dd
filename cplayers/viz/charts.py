"""Pictures of a plan and of a placement, written as PNG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from cplayers.cache import InterleavedLayout, Layout, ZigzagLayout
from cplayers.errors import ConfigError
from cplayers.planning import Candidate
from cplayers.planning.advice import describe
from cplayers.viz.placement import MAX_COLUMNS, rank_colour

PARTS = (("weights", "#4c6a92"), ("kv", "#e0a458"), ("workspace", "#b8c1ca"))
MOST_LAYOUTS = 12
_GB = 1e9


def plan_png(
    candidates: Sequence[Candidate], best: Candidate | None, title: str, path: Path
) -> None:
    """Memory of a card under each layout against what it has, beside predicted times.

    Args:
        candidates: The layouts, best first; the first dozen are drawn.
        best: The one that is recommended, or ``None``.
        title: Above the picture.
        path: File to write.
    """
    shown = list(candidates[:MOST_LAYOUTS])
    figure = Figure(figsize=(12, 1.6 + 0.42 * max(len(shown), 3)), layout="constrained")
    figure.suptitle(title)
    memory, first, token = figure.subplots(1, 3, sharey=True, width_ratios=(2, 1, 1))
    places = range(len(shown))
    left = [0.0] * len(shown)
    for part, colour in PARTS:
        sizes = [getattr(c.budget, part) / _GB for c in shown]
        memory.barh(places, sizes, left=left, color=colour, label=part)
        left = [a + b for a, b in zip(left, sizes, strict=True)]
    if shown:
        memory.axvline(shown[0].budget.capacity / _GB, color="#c0392b", label="usable")
        memory.set_xlim(0, 2.5 * shown[0].budget.capacity / _GB)
    memory.set_xlabel("memory of a card, GB (workspace predicted)")
    memory.set_yticks(places, [describe(c) + ("  ★" if c is best else "") for c in shown])
    memory.invert_yaxis()
    memory.legend(loc="lower right", fontsize="small")
    colours = ["#3a7d44" if c.fits else "#d5dbe1" for c in shown]
    for axes, values, label in (
        (first, [c.first_token.total for c in shown], "TTFT, s (predicted)"),
        (token, [1e3 * c.token.total for c in shown], "TPOT, ms (predicted)"),
    ):
        axes.barh(places, values, color=colours)
        axes.set_xlabel(label)
    _save(figure, path)


def placement_png(
    cache: InterleavedLayout, length: int, prompt: ZigzagLayout | None, path: Path
) -> None:
    """Which rank holds which token in which block, and who computes what of a prompt.

    Args:
        cache: Layout of the KV cache.
        length: Tokens of the sequence.
        prompt: How the ranks split a prompt, drawn below if given.
        path: File to write.

    Raises:
        ConfigError: If a row would need more cells than can be read.
    """
    panels: list[tuple[str, Layout, int]] = [("KV cache", cache, cache.block_size)]
    if prompt is not None:
        panels.append(("Prompt, split zigzag", prompt, prompt.chunk))
    if length > MAX_COLUMNS:
        raise ConfigError(
            f"tokens={length} in a picture",
            f"at most {MAX_COLUMNS} cells in a row can be read",
            f"draw tokens={MAX_COLUMNS} or fewer; the pattern repeats",
        )
    heights = [layout.cp_size + 1 for _, layout, _ in panels]
    figure = Figure(figsize=(12, 1.2 * len(panels) + 0.36 * sum(heights)), layout="constrained")
    grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for axes, (title, layout, frame) in zip(grid[:, 0], panels, strict=True):
        _draw(axes, layout, length, frame)
        size = f"blocks of {frame}" if layout is cache else f"chunks of {frame}"
        axes.set_title(f"{title}: {length} tokens on {layout.cp_size} ranks, {size}", loc="left")
    _save(figure, path)


def _draw(axes: Any, layout: Layout, length: int, frame: int) -> None:
    """The sequence in order, and below it what each rank holds, blocks outlined."""
    for pos in range(length):
        _cell(axes, layout, pos, pos, 0)
    widest = length
    for rank in range(layout.cp_size):
        held = [int(pos) for pos in layout.positions(rank, length)]
        for pos in held:
            _cell(axes, layout, pos, int(layout.local_index(pos)), rank + 1)
        blocks = -(-len(held) // frame)
        widest = max(widest, blocks * frame)
        for block in range(blocks):
            axes.add_patch(Rectangle((block * frame, rank + 1.1), frame, 0.8, fill=False, lw=1.6))
    axes.set_xlim(0, widest)
    axes.set_ylim(layout.cp_size + 1, 0)
    names = ["sequence", *(f"rank {rank}" for rank in range(layout.cp_size))]
    axes.set_yticks([0.5 + row for row in range(len(names))], names)
    axes.tick_params(length=0, labelbottom=False)
    for side in axes.spines.values():
        side.set_visible(False)


def _cell(axes: Any, layout: Layout, pos: int, column: int, row: int) -> None:
    colour = rank_colour(int(layout.owner(pos)), layout.cp_size)
    axes.add_patch(Rectangle((column, row + 0.1), 1, 0.8, facecolor=colour, edgecolor="white"))
    axes.text(column + 0.5, row + 0.5, str(pos), ha="center", va="center", fontsize=8)


def _save(figure: Figure, path: Path) -> None:
    if not path.parent.is_dir():
        raise ConfigError(f"--png {path}", "its folder exists", f"make {path.parent} first")
    FigureCanvasAgg(figure)
    figure.savefig(path, format="png")
