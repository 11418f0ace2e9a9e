# SPDX-License-Identifier: Apache-2.0
"""How a command prints: through rich where it is installed, else as plain text with tabs between columns."""

import sys
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

INSTALL: Final = 'Install it with: pip install "ringattn-core[cli]"'
PAGE: Final = 100
"""The width of what is written to a file or a pipe."""
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


class Title(str):
    """A heading."""


class TextTable(NamedTuple):
    """Rows of cells under a heading, which may be empty. `right` has an `r` for each column that is right-aligned."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: str = ""


def show(*parts: Any) -> None:
    """Prints titles, sentences, tables and rich's renderables, one below the other."""
    try:
        from rich.console import Console
    except ImportError:
        print("\n".join(map(_plain, parts)))
        return
    width = None if sys.stdout.isatty() else PAGE
    console = Console(width=width, markup=False, highlight=False, emoji=False)
    # Printed from here, so that a closed pipe raises BrokenPipeError; rich would exit with 1.
    with console.capture() as captured:
        for part in parts:
            style = "bold" if isinstance(part, Title) else None
            console.print(_rich(part) if isinstance(part, TextTable) else part, style=style)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _rich(table: TextTable) -> Any:
    from rich.table import Table

    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(table.head))
    for number, name in enumerate(table.head or table.rows[0]):
        flush = table.right[number : number + 1] == "r"
        made.add_column(name if table.head else "", justify="right" if flush else "left", header_style="bold")
    for row in table.rows:
        made.add_row(*row)
    return made


def _plain(part: Any) -> str:
    if not isinstance(part, TextTable):
        return str(part)
    return "\n".join("\t".join(row) for row in ([part.head] if part.head else []) + [*part.rows])


def amount(count: int) -> str:
    """Bytes, in the largest unit that leaves a number of at least 1."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{count} B" if power == 0 else f"{count / 1024**power:.1f} {_UNITS[power]}"
