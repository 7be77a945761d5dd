"""Tables on terminals of any width: side by side where they fit, else one block for each row."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Collection, Sequence

_LEAST = 20  # columns of a terminal, however narrow it says to be


def show(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    bold: Collection[int] = (),
    dim: Collection[int] = (),
    left: Collection[str] = (),
) -> None:
    """Print a table, or a block of ``column: cell`` for each row where a terminal is too narrow.

    Args:
        title: Above it.
        columns: Heads of the columns.
        rows: Cells, as text.
        bold: Rows to stress; ``>`` stands before their blocks.
        dim: Rows to play down.
        left: Columns to align to the left; the others are numbers.
    """
    if sys.stdout.isatty() and width(columns, rows) > (room := shutil.get_terminal_size().columns):
        print("\n".join(blocks(title, columns, rows, bold, max(room, _LEAST))))
        return
    from cplayers.viz.tables import show_table

    show_table(title, columns, rows, bold=bold, dim=dim, left=left)


def width(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> int:
    """Letters in a line of the table, rules included.

    Args:
        columns: Heads of the columns.
        rows: Cells.
    """
    lines = [columns, *([str(cell) for cell in row] for row in rows)]
    return sum(max(map(len, cells)) + 3 for cells in zip(*lines, strict=True)) + 1


def blocks(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    bold: Collection[int],
    room: int,
) -> list[str]:
    """Lines of at most ``room`` letters, but for cells that are longer.

    Args:
        title: The first of them.
        columns: Heads of the columns.
        rows: Cells.
        bold: Rows that ``>`` stands before.
        room: Letters in a line.
    """
    lines = _flow(title.split(" "), room, " ", "")
    for index, row in enumerate(rows):
        lines.append(f"{'>' if index in bold else '-'} {columns[0]}: {row[0]}")
        cells = [f"{column}: {cell}" for column, cell in zip(columns[1:], row[1:], strict=True)]
        lines += _flow(cells, room, ", ", "    ")
    return lines


def _flow(parts: Sequence[str], room: int, between: str, before: str) -> list[str]:
    """Parts one after another, a new line where there is no room for the next."""
    lines = [before + parts[0]] if parts else []
    for part in parts[1:]:
        if len(lines[-1]) + len(between) + len(part) <= room:
            lines[-1] += between + part
        else:
            lines[-1] += between.rstrip()
            lines.append(before + part)
    return lines
