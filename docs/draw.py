"""Write the drawings of the documentation: `python docs/draw.py`."""

from __future__ import annotations

from pathlib import Path

from cplayers.cache import InterleavedLayout, ZigzagLayout
from cplayers.viz import placement_svg

IMAGES = Path(__file__).parent / "images"


def placement() -> str:
    """22 tokens on 4 ranks: enough to show unequal shares and blocks that are not full."""
    cache = InterleavedLayout(cp_size=4, interleave_size=2, block_size=4)
    return placement_svg(cache, 22, ZigzagLayout(cp_size=4, length=22))


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    (IMAGES / "placement.svg").write_text(placement(), encoding="utf-8")
