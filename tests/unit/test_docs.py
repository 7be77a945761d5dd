"""Links of the documentation resolve, pages can be found, drawings are current."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
SKIPPED = {"build", "dist", "outputs", "multirun", "__pycache__"}
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".json", ".txt", ".svg", ".cfg", ".ini", ""}
# In pieces, so that this file does not contain what it looks for.
MACHINE_PATH = re.compile(r"(?<![\w.:/-])/(?:" + "|".join(("home", "root", "work", "Users")) + ")/")


def slug(heading: str) -> str:
    """The anchor that a heading gets."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def anchors_of(page: Path) -> set[str]:
    return {slug(h) for h in re.findall(r"^#+ (.+)$", prose_of(page), re.MULTILINE)}


def prose_of(page: Path) -> str:
    """A page without its fenced blocks."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def links_of(page: Path) -> list[str]:
    return [link for link in LINK.findall(prose_of(page)) if "://" not in link]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_resolve(page: Path) -> None:
    for link in links_of(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        if anchor:
            assert anchor in anchors_of(target), link


def test_every_page_is_reached_from_the_readme() -> None:
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in reached:
            reached.add(page)
            targets = [(page.parent / link.partition("#")[0]).resolve() for link in links_of(page)]
            waiting += [t for t in targets if t.suffix == ".md"]
    assert len(PAGES) >= 12
    assert reached == set(PAGES)


def test_files_named_in_text_exist() -> None:
    named = set()
    for page in PAGES:
        named |= set(
            re.findall(r"`((?:cplayers|docs|examples|tests)/[\w./]+\.\w+)`", prose_of(page))
        )
    assert len(named) >= 4
    for name in named:
        assert (ROOT / name).is_file(), name


def test_drawings_are_what_the_script_draws() -> None:
    script = runpy.run_path(str(DOCS / "draw.py"))
    drawn = script["placement"]()
    assert (DOCS / "images" / "placement.svg").read_text(encoding="utf-8") == drawn


def files() -> Iterator[Path]:
    """Files of the project, without what tools leave behind."""
    for top in sorted(ROOT.iterdir()):
        kept = top.name in (".ci", ".pre-commit-config.yaml", ".gitignore")
        if top.name in SKIPPED or top.suffix == ".egg-info" or (top.name[0] == "." and not kept):
            continue
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            if path.is_file() and path.suffix in TEXT and not SKIPPED & set(path.parts):
                yield path


def test_no_path_of_a_machine_is_written_down() -> None:
    checked = 0
    for path in files():
        found = MACHINE_PATH.search(path.read_text(encoding="utf-8"))
        assert not found, f"{path.relative_to(ROOT)}: {found}"
        checked += 1
    assert checked > 100
    assert MACHINE_PATH.search("see " + "/ho" + "me/me/x") is not None
