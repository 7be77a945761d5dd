"""Tables of a run, for a terminal and for docs/performance.md.

python -m benchmarks.report RESULTS.json            prints the tables again
python -m benchmarks.report RESULTS.json --docs     fills docs/performance.md and docs/images too
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.results import Bar, Case, Result, from_json, label_of, panels

DOCS = Path(__file__).parents[1] / "docs"
PAGE, IMAGES = DOCS / "performance.md", DOCS / "images"
COLOURS = {"pass": "green", "short": "red", "not measured": "yellow"}


def rows(case: Case) -> Iterator[list[str]]:
    """Contestant, ms, interquartile range, repeats, ratio; of several plain reads the fastest."""
    for name in case.shown:
        timing = case.timings[name]
        yield [
            name,
            f"{timing.median * 1e3:.3f}",
            f"{timing.spread:.0%}",
            str(len(timing.seconds)),
            f"{case.ratio(name):.2f}",
            case.notes.get(name, ""),
        ]
    for name, note in case.notes.items():
        if name not in case.timings:
            yield [name, "", "", "", "", note]


def table(result: Result) -> Table:
    shown = Table(title=result.title, title_justify="left")
    labels = list(dict.fromkeys(label for case in result.cases for label in case.at))
    for label in labels:
        shown.add_column(label, justify="right")
    shown.add_column("contestant")
    for heading in ("ms", "IQR", "n", "ratio"):
        shown.add_column(heading, justify="right")
    shown.add_column("note")
    for case in result.cases:
        size = [f"{case.at[label]:,}" if label in case.at else "" for label in labels]
        for row in rows(case):
            shown.add_row(*size, *map(escape, row))
            size = ["" for _ in size]
        shown.add_section()
    return shown


def bar_table(bars: Sequence[Bar]) -> Table:
    shown = Table(title="Bars", title_justify="left")
    for heading in ("what", "measured", "bar", ""):
        shown.add_column(heading, justify="left" if heading in ("what", "") else "right")
    for bar in bars:
        colour = COLOURS[bar.verdict]
        note = escape(f" ({bar.why})") if bar.value is None and bar.why else ""
        shown.add_row(*bar_row(bar)[:3], f"[{colour}]{bar.verdict}[/]{note}")
    return shown


def bar_row(bar: Bar) -> list[str]:
    sign = ">=" if bar.at_least else "<="
    return [
        bar.what,
        number(bar.value, bar.unit),
        f"{sign} {number(bar.limit, bar.unit)}",
        bar.verdict,
    ]


def short(value: float | None) -> str:
    """Three digits, and all before the point."""
    assert value is not None
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{short(value)}{'' if unit in ('x', '%') else ' '}{unit}"


def markdown(data: dict[str, Any], folder: Path) -> dict[str, str]:
    """Blocks for the page, by name; with the drawings that lie in ``folder``."""
    results = [from_json(result) for result in data["benchmarks"]]
    machine = data["machine"]
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items() if v)
    bars = [bar_row(bar) for result in results for bar in result.bars]
    blocks = {
        "machine": f"{machine['cpu']}, {machine['cores']} cores; Python {machine['python']}, "
        f"{versions}; {machine['date'][:10]}.",
        "bars": pipes(["what", "measured", "bar", ""], bars),
    }
    for result in results:
        parts = [pivot(title, cases) for title, cases in panels(result).items()]
        if (folder / drawing(result.name)).is_file():
            parts.append(f"![{result.title}](images/{drawing(result.name)})")
        blocks[result.name] = "\n\n".join(parts)
    return blocks


def drawing(name: str) -> str:
    """File of a benchmark's drawing, in the documentation."""
    return f"bench-{name.replace('_', '-')}.png"


def pivot(title: str, cases: Sequence[Case]) -> str:
    """A row for each number of keys, a column for each contestant: ms, and the ratio."""
    names = list(dict.fromkeys(label_of(name) for case in cases for name in case.shown))
    lines = []
    for case in cases:
        cells = {
            label_of(name): f"{short(case.timings[name].median * 1e3)} ({short(case.ratio(name))})"
            for name in case.shown
        }
        lines.append([f"{case.at['keys']:,}", *(cells.get(name, "") for name in names)])
    over = label_of(cases[0].baseline)
    return f"{title}, ms (ratio over {over}):\n\n" + pipes(["keys", *names], lines)


def pipes(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    head = ["| " + " | ".join(headings) + " |", "|" + "---|" * len(headings)]
    return "\n".join([*head, *("| " + " | ".join(line) + " |" for line in lines)])


def fill(page: str, blocks: dict[str, str]) -> str:
    """``page`` with each ``<!-- NAME -->`` ... ``<!-- end -->`` filled anew."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        return f"<!-- {name} -->\n{blocks[name]}\n<!-- end -->" if name in blocks else match[0]

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", block, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description="Print the tables of a run of the benchmarks.")
    parser.add_argument("results", type=Path, help="results.json of a run")
    parser.add_argument(
        "--docs", action="store_true", help="fill docs/performance.md and docs/images from it"
    )
    arguments = parser.parse_args()
    data = json.loads(arguments.results.read_text())
    results = [from_json(result) for result in data["benchmarks"]]
    console = Console()
    for result in results:
        console.print(table(result))
    console.print(bar_table([bar for result in results for bar in result.bars]))
    if arguments.docs:
        for result in results:
            plot = arguments.results.parent / f"{result.name}.png"
            if plot.is_file():
                shutil.copy(plot, IMAGES / drawing(result.name))
        PAGE.write_text(fill(PAGE.read_text(), markdown(data, IMAGES)))
        console.print(f"{PAGE} is filled from {arguments.results}")


if __name__ == "__main__":
    main()
