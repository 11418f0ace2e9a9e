# SPDX-License-Identifier: Apache-2.0
"""How rows become lines of text, and numbers become words that are read at a glance."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import Final

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_LEAST: Final = 24
"""Characters that the last column keeps however narrow the terminal is."""


def lines(head: Sequence[str], rows: Sequence[Sequence[str]], right: str = "", width: int = 100) -> Iterator[str]:
    """A table whose columns are as wide as they must be; the last one wraps at `width`.

    `right` has an `r` for each column whose entries end flush, in the order of the columns.
    """
    columns = list(zip(head, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    before = sum(widths[:-1]) + 2 * (len(widths) - 1)
    flush = [right[number : number + 1] == "r" for number in range(len(widths))]
    for row in (head, *rows):
        cells = [
            cell.rjust(size) if ends else cell.ljust(size) for cell, size, ends in zip(row, widths, flush, strict=True)
        ]
        last = row[-1] if not flush[-1] else cells[-1]
        first, *rest = textwrap.wrap(last, max(width - before, _LEAST), break_long_words=False) or [""]
        yield "  ".join([*cells[:-1], cells[-1] if flush[-1] else first]).rstrip()
        yield from (" " * before + line for line in rest)


def amount(count: int) -> str:
    """Bytes, with the largest unit that leaves a number of at least 1."""
    power = min(max(count.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{count} B" if power == 0 else f"{count / 1024**power:.1f} {_UNITS[power]}"


def share(part: float, whole: float) -> str:
    return "-" if whole == 0 else f"{100 * part / whole:.0f}%"
