# SPDX-License-Identifier: Apache-2.0
"""How the tiles of each rank and hop are drawn with characters."""

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np

from .explanation import MASKED, SKIPPED, WHOLE, WORDS, Explanation
from .picture import shrunk
from .screen import Screen

_ASCII: Final = {SKIPPED: ".", MASKED: "+", WHOLE: "#"}
_BLOCKS: Final = {SKIPPED: "·", MASKED: "▒", WHOLE: "█"}
_COLOURS: Final = {SKIPPED: 238, MASKED: 75, WHOLE: 26}
"""Of the 256 that terminals have: they stand out on dark and on light."""
_TALLEST: Final = 8
_LINES: Final = 44
"""What a picture takes at most, where the ring is small enough."""


class _Sizes(NamedTuple):
    """Characters of a panel, and how many panels go side by side; those of one character have no room for tiles."""

    wide: int
    tall: int
    gap: int
    band: int


def picture(found: Explanation, screen: Screen) -> Iterator[str]:
    """A panel for each rank and hop, queries down and keys across; ranks down, hops across."""
    label, hops = len(f"rank {found.ranks - 1}") + 2, len(found.hops)
    wide, tall, gap, band = _sizes(found.ranks, hops, screen.width - label)
    yield from _legend(screen, coarse=wide == 1)
    for first in range(0, hops, band):
        numbers = range(first, min(first + band, hops))
        yield ""
        yield _head([found.hops[column].number for column in numbers], label, wide, gap)
        for rank in range(found.ranks):
            panels = [_panel(found.states[rank, number], wide, tall, screen) for number in numbers]
            for number, parts in enumerate(zip(*panels, strict=True)):
                yield (f"rank {rank}" if number == 0 else "").ljust(label) + (" " * gap).join(parts)
            if tall > 1 and rank < found.ranks - 1:
                yield ""


def _sizes(ranks: int, hops: int, room: int) -> _Sizes:
    tall = min(_TALLEST, _LINES // ranks - 1, ((room + 1) // hops - 1) // 2)
    if tall > 1:
        return _Sizes(2 * tall, tall, 1, hops)
    gap = int(2 * hops <= room)
    return _Sizes(1, 1, gap, max(1, (room + gap) // (1 + gap)))


def _legend(screen: Screen, coarse: bool) -> Iterator[str]:
    if coarse:
        whole, none = _letters(screen)[WHOLE], _letters(screen)[SKIPPED]
        yield f"{none} no tile of the hop is computed   1 to 9 so many tenths   {whole} every tile"
    elif screen.colour:
        yield "   ".join(f"\x1b[38;5;{_COLOURS[state]}m██\x1b[0m {word}" for state, word in WORDS.items())
    else:
        yield "   ".join(f"{_letters(screen)[state]} {word}" for state, word in WORDS.items())


def _letters(screen: Screen) -> dict[int, str]:
    return _BLOCKS if screen.blocks else _ASCII


def _head(numbers: Sequence[int], label: int, wide: int, gap: int) -> str:
    if wide >= len(f"hop {numbers[-1]}"):
        return (" " * label + (" " * gap).join(f"hop {number}".ljust(wide) for number in numbers)).rstrip()
    return " " * label + f"hops {numbers[0]} to {numbers[-1]}"


def _panel(states: np.ndarray, wide: int, tall: int, screen: Screen) -> list[str]:
    if wide == 1:
        return [_tenths(states, _letters(screen))]
    if screen.colour:
        # Half blocks: each character is two cells, one above the other.
        cells = shrunk(states, 2 * tall, wide)
        pairs = zip(cells[::2], cells[1::2], strict=True)
        return ["".join(map(_halves, upper, lower)) + "\x1b[0m" for upper, lower in pairs]
    return ["".join(_letters(screen)[int(state)] for state in row) for row in shrunk(states, tall, wide)]


def _tenths(states: np.ndarray, letters: dict[int, str]) -> str:
    computed = np.count_nonzero(states)
    if computed in (0, states.size):
        return letters[WHOLE if computed else SKIPPED]
    return str(min(9, max(1, round(10 * computed / states.size))))


def _halves(upper: int, lower: int) -> str:
    return f"\x1b[38;5;{_COLOURS[int(upper)]};48;5;{_COLOURS[int(lower)]}m▀"
