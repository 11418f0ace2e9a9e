# SPDX-License-Identifier: Apache-2.0
"""How commands print: titles, sentences, errors and aligned tables, with units of bytes and seconds."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rich.console import Console
from rich.table import Table

Rows = Sequence[Mapping[str, Any]]
"""A table: for each row, its cells by column title. All rows have the same titles. Booleans mark rows by an arrow."""

PAGE: Final = 100
"""The line width, in characters, of output to a file or a pipe."""
_NUMBER: Final = re.compile(r"-?\d.*|-?")
_DURATIONS: Final = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Title(str):
    """A line that `show` prints in bold, as a heading."""


class Seconds(float):
    """A duration in seconds. As text it has the unit s, ms or us; in JSON it is a number."""

    def __str__(self) -> str:
        scale, unit = next((x for x in _DURATIONS if self >= x[0]), _DURATIONS[-1])
        return f"{float(self) / scale:.3g} {unit}" if self < 1000 else f"{float(self):.0f} s"


class Bytes(int):
    """A number of bytes. As text it has the largest unit in which it is at least 1; in JSON it is a number."""

    def __str__(self) -> str:
        power = min(max(self.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
        return f"{int(self)} B" if power == 0 else f"{self / 1024**power:.1f} {_UNITS[power]}"


def one_line(error: Exception) -> str:
    """The message of `error` and its notes, without those of JAX, as one line of text."""
    # JAX's note is about filtered tracebacks, and begins with a line of dashes.
    notes = (note for note in getattr(error, "__notes__", ()) if not note.startswith("---"))
    said = [" ".join(part.split()) for part in (str(error), *notes)]
    return " ".join([*(f"{part.rstrip('.')}." for part in said[:-1]), said[-1]])


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
    """The column titles and the rows of a table, as text. A dict of facts gives rows of two cells, and no titles."""
    if isinstance(table, dict):
        return [], [[name, _text("", value)] for name, value in table.items()]
    head = ["" if isinstance(value, bool) else name for name, value in table[0].items()]
    return head, [[_text(name, value) for name, value in row.items()] for row in table]


def _text(name: str, value: Any) -> str:
    """The text of a cell in the column titled `name`; in a table of facts, which has no titles, `name` is empty.

    A boolean in a table of facts is "yes" or "no". In a titled column, true is an arrow that marks the row.
    """
    if isinstance(value, bool):
        return ("->" if value else "") if name else "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)


def _rich(head: list[str], rows: list[list[str]]) -> Table:
    """A `rich.table.Table` without ruled lines. `head` is empty for facts; under titles, numbers are aligned right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(head))
    for name, *column in zip(head or ["", ""], *rows, strict=True):
        numbers = bool(head) and all(map(_NUMBER.fullmatch, column))
        made.add_column(name, justify="right" if numbers else "left", header_style="bold")
    for row in rows:
        made.add_row(*row)
    return made
