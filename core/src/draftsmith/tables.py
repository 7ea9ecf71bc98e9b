"""Tables on the terminal, of which no figure is ever cut off, and no name is taken for rich's markup."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

__all__ = ["print_whole"]

#: Characters that a table takes at most.
WIDEST = 1000


def print_whole(console: Console, table: Table) -> None:
    """Print a table that may be wider than the terminal: its lines then wrap, and no figure is cut.

    Cells are printed as they are: a category ``[/b]`` is no markup.
    """
    from rich.measure import Measurement

    needed = Measurement.get(console, console.options.update(width=WIDEST, markup=False), table).minimum
    console.print(table, width=max(console.width, needed), crop=False, markup=False)
