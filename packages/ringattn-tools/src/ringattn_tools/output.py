# SPDX-License-Identifier: Apache-2.0
"""How commands print: titles, sentences and aligned tables, with units of bytes and seconds."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

Rows = Sequence[Mapping[str, Any]]
"""A table, in JSON and as text. Its rows have the same keys, the titles of the columns; a boolean column marks rows."""

PAGE: Final = 100
"""The line width of output to a file or a pipe."""
_NUMBER: Final = re.compile(r"-?\d.*|-?")
_DURATIONS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Title(str):
    """A heading."""


class Seconds(float):
    """A duration; printed with a unit, and in JSON a number of seconds."""

    def __str__(self) -> str:
        scale, unit = next((x for x in _DURATIONS if self >= x[0]), _DURATIONS[-1])
        return f"{float(self) / scale:.3g} {unit}" if self < 1000 else f"{float(self):.0f} s"


class Bytes(int):
    """A number of bytes; printed in the largest unit in which it is at least 1, and in JSON a number."""

    def __str__(self) -> str:
        power = min(max(self.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
        return f"{int(self)} B" if power == 0 else f"{self / 1024**power:.1f} {_UNITS[power]}"


def show(*parts: Any) -> None:
    """Prints titles, sentences, tables (`Rows`) and facts (a dict of two columns), one below the other."""
    width = None if sys.stdout.isatty() else PAGE
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    # `print` raises BrokenPipeError for a closed pipe, which `main` handles. rich would exit with 1, also where it
    # flushes what was printed before.
    with console.capture() as captured:
        for part in parts:
            shown = _rich(*_cells(part)) if isinstance(part, (list, dict)) else part
            console.print(shown, style="bold" if isinstance(part, Title) else None)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()), flush=True)


def _cells(table: Rows | dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The titles of the columns (none for facts), and the rows, as text."""
    if isinstance(table, dict):
        return [], [[name, _text("", value)] for name, value in table.items()]
    head = ["" if isinstance(value, bool) else name for name, value in table[0].items()]
    return head, [[_text(name, value) for name, value in row.items()] for row in table]


def _text(name: str, value: Any) -> str:
    """The text of a cell in the column `name`. The name is empty in a table of facts.

    There a boolean is "yes" or "no"; in a named column it is an arrow that marks the row.
    """
    if isinstance(value, bool):
        return ("->" if value else "") if name else "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def _rich(head: list[str], rows: list[list[str]]) -> Table:
    """A table of rich without lines. Columns of numbers are aligned to the right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(head))
    for name, *column in zip(head or ["", ""], *rows, strict=True):
        numbers = bool(head) and all(map(_NUMBER.fullmatch, column))
        made.add_column(name, justify="right" if numbers else "left", header_style="bold")
    for row in rows:
        made.add_row(*row)
    return made
