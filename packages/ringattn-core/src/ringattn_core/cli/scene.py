# SPDX-License-Identifier: Apache-2.0
"""Where everything in the picture of an explanation goes; `svg` and `png` only write it down."""

import dataclasses
from collections.abc import Iterator
from typing import Final, Literal

import numpy as np

from .explanation import MASKED, SKIPPED, WHOLE, WORDS, Explanation
from .picture import shrunk
from .report import balance, contents, described, rank, title, totals
from .table import amount

INK: Final = "#1b1f24"
MUTED: Final = "#5b6570"
COLOURS: Final = {SKIPPED: "#e9edf1", MASKED: "#86b6e4", WHOLE: "#1c5a9e"}
_MARGIN: Final = 28
_LABEL: Final = 64
_ACROSS: Final = 920
_BARS: Final = 150
_LARGEST: Final = 128
_SMALLEST: Final = 12
_TITLED: Final = 76
"""The width of a panel from which its heading has words."""


@dataclasses.dataclass(frozen=True)
class Box:
    """A filled rectangle, in pixels from the upper left."""

    x: float
    y: float
    width: float
    height: float


@dataclasses.dataclass(frozen=True)
class Area:
    """Rectangles of one colour."""

    colour: str
    boxes: tuple[Box, ...]


@dataclasses.dataclass(frozen=True)
class Words:
    """A line of text whose baseline starts, centres or ends at a point."""

    x: float
    y: float
    text: str
    size: float = 12
    anchor: Literal["start", "middle", "end"] = "start"
    colour: str = INK
    bold: bool = False


@dataclasses.dataclass(frozen=True)
class Scene:
    """A picture: its size, what it is called, and what is drawn, in order."""

    width: float
    height: float
    title: str
    items: tuple[Area | Words, ...]


def scene(found: Explanation) -> Scene:
    """Ranks down and hops across, a panel each; the work of each rank beside it, what is sent below."""
    hops = len(found.hops)
    panel = max(_SMALLEST, min(_LARGEST, _ACROSS // hops))
    gap = 8 if panel >= _TITLED else 3 if panel > 2 * _SMALLEST else 1
    left, top = _MARGIN + _LABEL, _MARGIN + 116
    width = max(left + hops * (panel + gap) + _BARS + _MARGIN, 760)
    bottom = top + found.ranks * (panel + gap)
    items = [*_heading(found), *_columns(found, left, top, bottom, panel, gap)]
    bars = left + hops * (panel + gap) + 12
    for number in range(found.ranks):
        y = top + number * (panel + gap)
        if panel >= 14 or number % 4 == 0:
            items.append(Words(left - 10, y + panel / 2 + 4, f"rank {number}", min(12, panel), "end"))
        for hop in range(hops):
            items += _panel(found.states[number, hop], left + hop * (panel + gap), y, panel)
        items += _bar(found, number, bars, y, panel)
    items.append(Words(bars, top - 10, "tiles computed", 11, colour=MUTED))
    items += _foot(found, bottom + 48)
    return Scene(
        width, bottom + 48 + 62, title(found), (*_by_colour(items), *(x for x in items if isinstance(x, Words)))
    )


def _by_colour(items: list[Area | Words]) -> Iterator[Area]:
    """One area a colour, in the order in which colours appear: what is skipped lies under what is not."""
    boxes: dict[str, list[Box]] = {}
    for item in items:
        if isinstance(item, Area):
            boxes.setdefault(item.colour, []).extend(item.boxes)
    for colour, drawn in boxes.items():
        yield Area(colour, tuple(drawn))


def _heading(found: Explanation) -> Iterator[Area | Words]:
    rows, columns = found.states.shape[2:]
    yield Words(_MARGIN, _MARGIN + 12, title(found), 16, bold=True)
    yield Words(_MARGIN, _MARGIN + 33, described(found), 12, colour=MUTED)
    by = f"by {found.choice}" if found.choice else "by no backend that is installed"
    tiles = "{} queries by {} keys".format(*found.tile)
    yield Words(
        _MARGIN,
        _MARGIN + 51,
        f"{by} on {found.platform}; each panel is {rows} x {columns} tiles of {tiles}",
        12,
        colour=MUTED,
    )


def _columns(found: Explanation, left: float, top: float, bottom: float, panel: int, gap: int) -> Iterator[Words]:
    """What each hop is called, and what is sent while it lasts."""
    titled = panel >= _TITLED
    if not titled:
        yield Words(left - 10, top - 8, "hop", 10, "end", MUTED)
    every = 1 if panel >= 20 else 4
    ways = max(hop.ways for hop in found.hops)
    for column, hop in enumerate(found.hops):
        middle = left + column * (panel + gap) + panel / 2
        if titled:
            whose = f"keys of rank {rank(-hop.offset)}" if hop.offset else "own keys"
            yield Words(middle, top - 26, f"hop {hop.number}", 12, "middle", bold=True)
            yield Words(middle, top - 10, whose, 10.5, "middle", MUTED)
        elif column % every == 0:
            yield Words(middle, top - 8, str(hop.number), 10, "middle", MUTED)
        if titled and hop.offset >= 0 and ways * hop.number < len(found.forward):
            message = found.forward[ways * hop.number]
            each = "2 x " if ways == 2 else ""
            sent = f"{each}{contents(message)} {amount(message.bytes)} \N{RIGHTWARDS ARROW}"
            yield Words(middle + (panel + gap) / 2, bottom + 14, sent, 10.5, "middle", MUTED)


def _panel(states: np.ndarray, x: float, y: float, size: int) -> Iterator[Area]:
    rows, columns = (min(tiles, size // 2) for tiles in states.shape)
    cells = shrunk(states, rows, columns)
    yield Area(COLOURS[SKIPPED], (Box(x, y, size, size),))
    for state in (MASKED, WHOLE):
        boxes = tuple(
            Box(
                round(x + size * left / columns, 2), round(y + size * upper / rows, 2),
                round(size * (right - left) / columns, 2), round(size * (lower - upper) / rows, 2),
            )
            for upper, lower, left, right in rectangles(cells == state)
        )  # fmt: skip
        if boxes:
            yield Area(COLOURS[state], boxes)


def rectangles(chosen: np.ndarray) -> Iterator[tuple[int, int, int, int]]:
    """Disjoint `(upper, lower, left, right)` that cover exactly what is chosen: runs, joined while rows are alike."""
    started: dict[tuple[int, int], int] = {}
    for number, row in enumerate([*chosen, np.zeros(chosen.shape[1], bool)]):
        edges = np.flatnonzero(np.diff(np.concatenate([[False], row, [False]]).astype(np.int8)))
        runs = [(int(left), int(right)) for left, right in zip(edges[::2], edges[1::2], strict=True)]
        for run in [run for run in started if run not in runs]:
            yield started.pop(run), number, *run
        for run in runs:
            started.setdefault(run, number)


def _bar(found: Explanation, number: int, x: float, y: float, panel: int) -> Iterator[Area | Words]:
    count, most = found.of_ranks[number], max(*found.of_ranks, 1)
    tall = min(14, panel - 2)
    length = (_BARS - 74) * count / most
    middle = y + panel / 2
    yield Area(COLOURS[WHOLE], (Box(x, middle - tall / 2, round(length, 2), tall),))
    if panel >= 14 or number % 4 == 0:
        yield Words(x + length + 6, middle + 4, f"{count}", min(11, panel), colour=MUTED)


def _foot(found: Explanation, y: float) -> Iterator[Area | Words]:
    x = _MARGIN
    for state, words in WORDS.items():
        yield Area(COLOURS[state], (Box(x, y - 10, 12, 12),))
        yield Words(x + 18, y, words, 11, colour=MUTED)
        x += 40 + 6.1 * len(words)
    yield Words(_MARGIN, y + 24, balance(found), 12)
    yield Words(_MARGIN, y + 42, totals(found), 12)
