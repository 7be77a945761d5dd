"""Where tokens live: an SVG with one row per rank and one coloured cell per token.

The cells come from the layouts that the cache itself uses, so the drawing cannot disagree with it.
Every cell carries `data-panel`, `data-row`, `data-rank`, `data-position` and `data-index`.
"""

from __future__ import annotations

import colorsys
from collections.abc import Iterator
from dataclasses import dataclass
from xml.sax.saxutils import escape

from cplayers.cache import InterleavedLayout, Layout, ZigzagLayout
from cplayers.errors import ConfigError

WIDTH = 800
MAX_COLUMNS = 48  # more would make a cell too narrow for its number

_MARGIN = 24
_LABELS = 76  # width of the row names
_CELL_HEIGHT = 26
_ROW = 34
_HEAD = 58  # title and note of a panel
_INK = "#1f2933"
_FAINT = "#66727f"


@dataclass(frozen=True)
class _Panel:
    """One layout drawn: the sequence in order, then what each rank holds of it."""

    name: str
    title: str
    note: str
    layout: Layout
    length: int
    frame: int  # tokens in one outlined group of a rank's row: a block or a chunk
    shows_free: bool  # draw the slots of a block that hold no token yet

    def held(self, rank: int) -> list[int]:
        return [int(p) for p in self.layout.positions(rank, self.length)]

    def frames(self, rank: int) -> int:
        return -(-len(self.held(rank)) // self.frame)

    @property
    def columns(self) -> int:
        widest = max(self.frames(rank) for rank in range(self.layout.cp_size)) * self.frame
        return max(self.length, widest if self.shows_free else 0)

    @property
    def height(self) -> int:
        return _HEAD + (self.layout.cp_size + 1) * _ROW + 14


def placement_svg(cache: InterleavedLayout, length: int, prompt: ZigzagLayout | None = None) -> str:
    """Draw which rank holds which token, and in which block.

    Args:
        cache: Layout of the KV cache.
        length: Tokens in the sequence, at least 1.
        prompt: How the same ranks split a prompt; drawn below if given.

    Returns:
        An SVG document, 800 px wide, on a white background so that dark pages can show it.

    Raises:
        ConfigError: If a row would need more than 48 cells, or there is nothing to draw.
    """
    panels = [_cache_panel(cache, length)]
    if prompt is not None:
        panels.append(_prompt_panel(prompt))
    for panel in panels:
        if panel.length < 1:
            raise ConfigError(f"length={panel.length}", "nothing to draw", "pass a length >= 1")
    columns = max(panel.columns for panel in panels)
    if columns > MAX_COLUMNS:
        raise ConfigError(
            f"{columns} cells in a row",
            f"at most {MAX_COLUMNS} can be read in {WIDTH} px",
            "draw a shorter sequence or smaller blocks",
        )
    cell = min(34.0, (WIDTH - 2 * _MARGIN - _LABELS) / columns)
    height = sum(panel.height for panel in panels) + _MARGIN
    body: list[str] = []
    top = 8
    for panel in panels:
        body.extend(_draw(panel, top, cell))
        top += panel.height
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
            f' viewBox="0 0 {WIDTH} {height}" font-family="Helvetica, Arial, sans-serif">',
            f"<title>{escape(panels[0].title)}</title>",
            f'<rect x="1" y="1" width="{WIDTH - 2}" height="{height - 2}" rx="12" fill="#ffffff"'
            ' stroke="#d5dbe1"/>',
            *body,
            "</svg>\n",
        ]
    )


def _cache_panel(cache: InterleavedLayout, length: int) -> _Panel:
    tokens = "token" if cache.interleave_size == 1 else f"{cache.interleave_size} tokens"
    return _Panel(
        name="cache",
        title=f"KV cache: {length} tokens on {cache.cp_size} ranks",
        note=f"Every {tokens} go to the next rank. Outlined: blocks of {cache.block_size}."
        " Dashed: slots that are still free.",
        layout=cache,
        length=length,
        frame=cache.block_size,
        shows_free=True,
    )


def _prompt_panel(prompt: ZigzagLayout) -> _Panel:
    n = prompt.cp_size
    return _Panel(
        name="prompt",
        title=f"Prompt: {prompt.length} tokens, split zigzag over {n} ranks",
        note=f"Of {2 * n} chunks, rank r takes r and {2 * n - 1} − r: an early one, which sees few"
        " keys, and a late one, which sees many.",
        layout=prompt,
        length=prompt.length,
        frame=prompt.chunk,
        shows_free=False,
    )


def _draw(panel: _Panel, top: float, cell: float) -> Iterator[str]:
    yield _text(_MARGIN, top + 24, panel.title, size=16, weight="bold")
    yield _text(_MARGIN, top + 43, panel.note, size=12, fill=_FAINT)
    size = panel.layout.cp_size
    y = top + _HEAD
    yield _text(_MARGIN, y + 17, "sequence", fill=_FAINT)
    for pos in range(panel.length):
        rank = int(panel.layout.owner(pos))
        yield _cell(panel, "sequence", rank, pos, pos, _x(pos, cell), y, cell)
    for rank in range(size):
        y += _ROW
        yield _text(_MARGIN, y + 17, f"rank {rank}")
        held = panel.held(rank)
        if panel.shows_free:
            for index in range(len(held), panel.frames(rank) * panel.frame):
                yield _free(_x(index, cell), y, cell)
        for pos in held:
            index = int(panel.layout.local_index(pos))
            yield _cell(panel, "rank", rank, pos, index, _x(index, cell), y, cell)
        for number in range(panel.frames(rank)):
            first = number * panel.frame
            last = first + panel.frame
            stop = last if panel.shows_free else min(last, len(held))
            yield (
                f'<rect class="frame" x="{_x(first, cell):.2f}" y="{y}"'
                f' width="{(stop - first) * cell:.2f}" height="{_CELL_HEIGHT}" rx="3" fill="none"'
                f' stroke="{_INK}" stroke-width="1.8"/>'
            )


def _cell(
    panel: _Panel, row: str, rank: int, pos: int, index: int, x: float, y: float, cell: float
) -> str:
    centre = x + cell / 2
    return (
        f'<g data-panel="{panel.name}" data-row="{row}" data-rank="{rank}" data-position="{pos}"'
        f' data-index="{index}"><rect x="{x:.2f}" y="{y}" width="{cell:.2f}"'
        f' height="{_CELL_HEIGHT}" fill="{rank_colour(rank, panel.layout.cp_size)}"'
        f' stroke="#ffffff"/>{_text(centre, y + 17, str(pos), anchor="middle")}</g>'
    )


def _free(x: float, y: float, cell: float) -> str:
    return (
        f'<rect class="free" x="{x:.2f}" y="{y}" width="{cell:.2f}" height="{_CELL_HEIGHT}"'
        ' fill="none" stroke="#b8c1ca" stroke-dasharray="3 3"/>'
    )


def rank_colour(rank: int, cp_size: int) -> str:
    """A light fill for one of ``cp_size`` ranks, evenly spaced in hue, as `#rrggbb`."""
    red, green, blue = colorsys.hls_to_rgb((rank / cp_size + 0.57) % 1.0, 0.80, 0.75)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _x(column: int, cell: float) -> float:
    return _MARGIN + _LABELS + column * cell


def _text(
    x: float,
    y: float,
    words: str,
    *,
    size: int = 12,
    fill: str = _INK,
    anchor: str = "start",
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
        f' font-weight="{weight}">{escape(words)}</text>'
    )
