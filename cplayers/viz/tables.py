"""Tables in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table


class _Console(Console):
    """One that lets the caller know when whoever reads has left, and does not exit by itself."""

    def on_broken_pipe(self) -> None:
        """Called while a BrokenPipeError is handled."""
        raise


def show_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    bold: Collection[int] = (),
    dim: Collection[int] = (),
    left: Collection[str] = (),
) -> None:
    """Print a table; as wide as its content where the output is not a terminal.

    Args:
        title: Above it.
        columns: Heads of the columns.
        rows: Cells, as text.
        bold: Rows to stress.
        dim: Rows to play down.
        left: Columns to align to the left; the others are numbers.
    """
    console = _Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    console.print(title, style="bold", markup=False)  # as its title it would be cut to its width
    table = Table()
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", overflow="fold")
    for index, row in enumerate(rows):
        style = "bold green" if index in bold else "dim" if index in dim else None
        table.add_row(*(str(cell) for cell in row), style=style)
    console.print(table)
