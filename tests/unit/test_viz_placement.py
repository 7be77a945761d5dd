"""The drawing is read back as XML and compared with placement worked out by rule or by hand."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cplayers.cache import InterleavedLayout, ZigzagLayout
from cplayers.errors import ConfigError
from cplayers.viz import placement_svg

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Cell:
    rank: int
    position: int
    index: int
    x: float
    y: float
    width: float
    fill: str
    words: str


def cells(svg: str, panel: str, row: str) -> list[Cell]:
    found = []
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        if (group.get("data-panel"), group.get("data-row")) != (panel, row):
            continue
        rect, text = group.find(f"{SVG}rect"), group.find(f"{SVG}text")
        assert rect is not None and text is not None
        found.append(
            Cell(
                rank=int(group.attrib["data-rank"]),
                position=int(group.attrib["data-position"]),
                index=int(group.attrib["data-index"]),
                x=float(rect.attrib["x"]),
                y=float(rect.attrib["y"]),
                width=float(rect.attrib["width"]),
                fill=rect.attrib["fill"],
                words=text.text or "",
            )
        )
    return found


def rows_by_height(drawn: list[Cell]) -> list[list[int]]:
    """What a reader sees: the positions of each row, from top to bottom and left to right."""
    heights = sorted({c.y for c in drawn})
    return [
        [c.position for c in sorted(drawn, key=lambda c: c.x) if c.y == height]
        for height in heights
    ]


def test_rows_show_the_worked_example() -> None:
    svg = placement_svg(
        InterleavedLayout(cp_size=3, interleave_size=2, block_size=4), 11, ZigzagLayout(3, 11)
    )
    assert rows_by_height(cells(svg, "cache", "rank")) == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10]]
    # Six chunks of two: (0 1) (2 3) (4 5) (6 7) (8 9) (10); rank r takes r and 5 - r.
    assert rows_by_height(cells(svg, "prompt", "rank")) == [[0, 1, 10], [2, 3, 8, 9], [4, 5, 6, 7]]
    frames = [e for e in ET.fromstring(svg).iter(f"{SVG}rect") if e.get("class") == "frame"]
    free = [e for e in ET.fromstring(svg).iter(f"{SVG}rect") if e.get("class") == "free"]
    assert len(frames) == 3 + 6
    assert len(free) == 1  # only rank 2 has a slot left in its block


@given(
    n=st.integers(1, 9),
    interleave=st.integers(1, 7),
    block=st.integers(1, 8),
    length=st.integers(1, 40),
)
@example(n=2, interleave=1, block=8, length=1)
@example(n=4, interleave=16, block=4, length=10)  # ranks 1 to 3 hold nothing
def test_every_token_is_drawn_once_where_it_lives(
    n: int, interleave: int, block: int, length: int
) -> None:
    svg = placement_svg(InterleavedLayout(n, interleave, block), length, ZigzagLayout(n, length))
    drawn = cells(svg, "cache", "rank")
    assert sorted(c.position for c in drawn) == list(range(length))
    count = [0] * n
    for cell in sorted(drawn, key=lambda c: c.position):
        owner = (cell.position // interleave) % n
        assert (cell.rank, cell.index) == (owner, count[owner])
        count[owner] += 1
    for cell in drawn:
        assert cell.words == str(cell.position)
        assert cell.x == pytest.approx(100 + cell.index * cell.width, abs=0.5)
        assert cell.x + cell.width <= 800 - 24 + 0.5
    zigzag = cells(svg, "prompt", "rank")
    assert sorted(c.position for c in zigzag) == list(range(length))
    chunk = max(1, -(-length // (2 * n)))
    assert all(c.rank == min(c.position // chunk, 2 * n - 1 - c.position // chunk) for c in zigzag)


@given(n=st.integers(1, 9), length=st.integers(1, 40))
def test_the_sequence_strip_has_the_colours_of_the_owners(n: int, length: int) -> None:
    svg = placement_svg(InterleavedLayout(n, 2, 4), length)
    strip, held = cells(svg, "cache", "sequence"), cells(svg, "cache", "rank")
    assert [c.position for c in strip] == list(range(length))
    assert all(left.x < right.x for left, right in pairwise(strip))
    by_position = {c.position: c for c in held}
    assert all(c.fill == by_position[c.position].fill for c in strip)
    colours = {c.rank: c.fill for c in held}
    assert len(set(colours.values())) == len(colours), "two ranks share a colour"
    assert all(re.fullmatch("#[0-9a-f]{6}", fill) for fill in colours.values())


def test_a_row_that_is_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"49 cells in a row: at most 48.*shorter sequence"):
        placement_svg(InterleavedLayout(2, 1, 4), 49)
    assert placement_svg(InterleavedLayout(2, 1, 4), 48)


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"length=0: nothing to draw. Remedy: pass a length >= 1"):
        placement_svg(InterleavedLayout(2, 1, 4), 0)
