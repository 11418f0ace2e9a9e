# SPDX-License-Identifier: Apache-2.0
"""The picture of a call analysis: which tiles each rank computes at each hop, on a terminal, as SVG or as PNG."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import UInt8

from ..errors import InputError
from .analysis import MASKED, SKIPPED, WHOLE, WORDS, CallAnalysis, rank
from .output import INSTALL, amount
from .report import balance, described, title, totals

KINDS: Final = ("svg", "png")

COLOURS: Final = {SKIPPED: "#e9edf1", MASKED: "#86b6e4", WHOLE: "#1c5a9e"}
MUTED: Final = "#5b6570"
_LETTERS: Final = {SKIPPED: ".", MASKED: "+", WHOLE: "#"}
_STYLES: Final = {
    SKIPPED: "color(238) on color(238)",
    MASKED: "color(75) on color(75)",
    WHOLE: "color(26) on color(26)",
}
"""Colours that hide the letter in a coloured block. On a terminal without colours, the letter shows."""
_ROWS: Final = 8
_LINES: Final = 44
"""The most lines of a panel, and of a whole picture on a terminal."""


def shrunk(
    states: UInt8[np.ndarray, "... q_tiles kv_tiles"], rows: int, columns: int
) -> UInt8[np.ndarray, "... rows columns"]:
    """Shrinks the tiles to a grid of cells. A cell is `WHOLE` or `SKIPPED` if all its tiles are, else `MASKED`.

    With fewer tiles than cells, a tile fills several cells.
    """
    down, across = (np.arange(cells) * n // cells for cells, n in zip((rows, columns), states.shape[-2:], strict=True))
    lowest, highest = (pool.reduceat(pool.reduceat(states, down, -2), across, -1) for pool in (np.minimum, np.maximum))
    return np.where(lowest == highest, lowest, MASKED).astype(np.uint8)


class TerminalPicture(NamedTuple):
    """A renderable of rich: rows of ranks and columns of hops. Each panel has queries down and keys across."""

    found: CallAnalysis

    def __str__(self) -> str:
        return f"The picture of the tiles needs rich. {INSTALL}"

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.table import Table
        from rich.text import Text

        found, hops = self.found, len(self.found.hops)
        room = options.max_width - len(f"rank {found.ranks - 1} ")
        rows = min(_ROWS, _LINES // found.ranks - 1, ((room + 1) // hops - 1) // 2)
        if rows < 2:
            yield "The ring is too large for a picture here; --svg and --png draw it."
            return
        legend = [Text.assemble((_LETTERS[state], _STYLES[state]), f" {word}") for state, word in WORDS.items()]
        yield Text("   ").join(legend).append("\n")
        grid = Table("", *(f"hop {hop.number}" for hop in found.hops), box=None, pad_edge=False, padding=(0, 1, 0, 0))
        for number, of_rank in enumerate(found.states):
            grid.add_row(f"rank {number}", *(_text(shrunk(states, rows, 2 * rows)) for states in of_rank))
            grid.add_row()
        yield grid


def _text(cells: np.ndarray) -> Any:
    """The cells as coloured letters, a line for each row."""
    from rich.text import Text

    lines = (Text.assemble(*((_LETTERS[state], _STYLES[state]) for state in row)) for row in cells.tolist())
    return Text("\n").join(lines)


def save(found: CallAnalysis, path: Path, kind: str) -> None:
    """Writes the picture as `kind`, "svg" or "png"."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise InputError(f"--{kind}", f"needs matplotlib ({error})", INSTALL) from error
    metadata = {"Title": title(found)} | ({"Date": None, "Creator": None} if kind == "svg" else {"Software": None})
    # A fixed salt makes equal calls give equal files; with "none", text stays text.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ringattn", "font.size": 9}):
        try:
            figure(found).savefig(path, format=kind, dpi=150, metadata=metadata)
        except OSError as error:
            raise InputError(f"--{kind}", f"cannot write {path}: {error.strerror}", "Name another file") from error


def figure(found: CallAnalysis) -> Any:
    """A matplotlib figure: rows of ranks and columns of hops. Beside it the tiles of each rank, below it the sends."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    hops, side = len(found.hops), min(1.4, 13 / max(len(found.hops), found.ranks))
    beside = max(2, hops // 8)
    made = Figure((max(7.5, side * (hops + beside) + 1), side * found.ranks + 2.4), layout="constrained", facecolor="white")
    tiles, bars = made.subplots(1, 2, sharey=True, width_ratios=(hops, beside))
    colours = ListedColormap([COLOURS[state] for state in (SKIPPED, MASKED, WHOLE)])
    extent = (-0.5, hops - 0.5, found.ranks - 0.5, -0.5)
    tiles.imshow(_mosaic(found), colours, vmin=0, vmax=2, interpolation="none", extent=extent, aspect="auto")
    _label_hops(found, tiles, wide=side > 1)
    named = range(0, found.ranks, _every(found.ranks))
    tiles.set_yticks(named, [f"rank {number}" for number in named])
    bars.hlines(range(found.ranks), 0, found.of_ranks, COLOURS[WHOLE], linewidth=72 * side / 5)
    for number in named:
        count = found.of_ranks[number]
        bars.annotate(f"{count}", (count, number), (3, 0), textcoords="offset points", va="center", color=MUTED)
    bars.set_title("tiles computed", fontsize="medium", color=MUTED, loc="left")
    bars.set_xticks([])
    bars.set_xlim(0, 1.5 * max(1, *found.of_ranks))
    for axes in (tiles, bars):
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    rows, columns = found.states.shape[2:]
    by = f"by {found.choice}" if found.choice else "by no installed backend"
    each = "each panel is {} x {} tiles of {} queries by {} keys".format(rows, columns, *found.tile)
    made.suptitle(f"{title(found)}\n{described(found)}\n{by} on {found.platform}; {each}", x=0.01, ha="left")
    words, patches = f"{balance(found)}\n{totals(found)}", [Patch(color=COLOURS[x], label=WORDS[x]) for x in WORDS]
    made.legend(handles=patches, title=words, alignment="left", loc="outside lower left", ncols=3, frameon=False)
    return made


def _every(count: int) -> int:
    """The distance of labels: every rank or hop up to 32, and 16 to 32 labels of more."""
    return 1 if count <= 32 else count // 16


def _mosaic(found: CallAnalysis) -> np.ma.MaskedArray:
    """All panels as one image of cells, with masked gaps between them if there is room."""
    panels = max(found.ranks, len(found.hops))
    cells = max(1, min(64, 512 // panels), min(2, 2048 // panels))
    gap, gaps = -(-cells // 16) if cells >= 8 else 0, 255
    rows, columns = (min(cells, tiles) for tiles in found.states.shape[2:])
    states = shrunk(found.states, rows, columns).repeat(-(-cells // rows), 2).repeat(-(-cells // columns), 3)
    apart = np.pad(states, ((0, 0), (0, 0), (gap, gap), (gap, gap)), constant_values=gaps)
    return np.ma.masked_equal(np.concatenate(np.concatenate(apart, 1), 1), gaps)


def _label_hops(found: CallAnalysis, axes: Any, wide: bool) -> None:
    """Labels each column: above, the hop and the owner of its keys; below, what is sent during the hop."""
    every, names = _every(len(found.hops)), [f"{hop.number}" for hop in found.hops]
    sent: dict[float, str] = {}
    if wide:
        whose = [f"keys of rank {rank(-hop.offset)}" if hop.offset else "own keys" for hop in found.hops]
        names = [f"hop {name}\n{keys}" for name, keys in zip(names, whose, strict=True)]
        ways, last = ("2 x " if found.hops[-1].ways == 2 else ""), found.hops[-1].number
        for column, hop in enumerate(found.hops):
            if hop.offset >= 0 and hop.number < last:
                first = found.sent[0]
                sent[column + 0.5] = f"{ways}{first['what']} {amount(first['bytes'])} \N{RIGHTWARDS ARROW}"
    else:
        axes.set_title("hop", fontsize="medium", color=MUTED, loc="left")
    axes.set_xticks(range(0, len(names), every), names[::every])
    axes.xaxis.tick_top()
    below = axes.secondary_xaxis("bottom")
    below.set_xticks(list(sent), list(sent.values()), color=MUTED)
    below.tick_params(length=0)
    below.spines[:].set_visible(False)
