# SPDX-License-Identifier: Apache-2.0
"""The picture of a call analysis: which tiles each rank computes at each hop, on a terminal, as SVG or as PNG."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import UInt8

from ..errors import InputError
from .analysis import MASKED, SKIPPED, WHOLE, WORDS, CallAnalysis
from .output import INSTALL, amount
from .report import balance, contents, described, rank, title, totals

COLOURS: Final = {SKIPPED: "#e9edf1", MASKED: "#86b6e4", WHOLE: "#1c5a9e"}
MUTED: Final = "#5b6570"
_LETTERS: Final = {SKIPPED: ".", MASKED: "+", WHOLE: "#"}
_STYLES: Final = {
    SKIPPED: "color(238) on color(238)",
    MASKED: "color(75) on color(75)",
    WHOLE: "color(26) on color(26)",
}
"""On a terminal with colours a letter is a coloured block; without colours it is read."""
_ROWS: Final = 8
_LINES: Final = 44
"""The most lines of a panel, and of a picture whose panels show tiles."""


def shrunk(states: UInt8[np.ndarray, "q_tiles kv_tiles"], rows: int, columns: int) -> UInt8[np.ndarray, "rows columns"]:
    """A grid of cells: `WHOLE` or `SKIPPED` where all tiles of a cell are, else `MASKED`.

    Where there are fewer tiles than cells, a tile fills several cells.
    """
    starts = [np.arange(cells) * tiles // cells for cells, tiles in zip((rows, columns), states.shape, strict=True)]
    lowest, highest = (
        pool.reduceat(pool.reduceat(states, starts[0], 0), starts[1], 1) for pool in (np.minimum, np.maximum)
    )
    return np.where(lowest == highest, lowest, MASKED).astype(np.uint8)


class TerminalPicture(NamedTuple):
    """What rich prints: a panel for each rank and hop, queries down and keys across; ranks down and hops across."""

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
    """The cells as letters, a line for each row."""
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
    # The same call gives the same file; text stays text.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ringattn", "font.size": 9}):
        try:
            figure(found).savefig(path, format=kind, dpi=150, metadata=metadata)
        except OSError as error:
            raise InputError(f"--{kind}", f"cannot write {path}: {error.strerror}", "Name another file") from error


def figure(found: CallAnalysis) -> Any:
    """A matplotlib figure: ranks down and hops across; the tiles of each rank beside it, what is sent below."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    hops, side = len(found.hops), max(0.2, min(1.4, 10 / len(found.hops)))
    made = Figure((max(7.5, side * (hops + 2) + 1), side * found.ranks + 2.4), layout="constrained", facecolor="white")
    tiles, bars = made.subplots(1, 2, sharey=True, width_ratios=(hops, 2))
    colours = ListedColormap([COLOURS[state] for state in (SKIPPED, MASKED, WHOLE)])
    extent = (-0.5, hops - 0.5, found.ranks - 0.5, -0.5)
    tiles.imshow(_mosaic(found), colours, vmin=0, vmax=2, interpolation="none", extent=extent, aspect="auto")
    _label_hops(found, tiles, wide=side > 1)
    every = 1 if side > 0.3 else 4
    tiles.set_yticks(range(0, found.ranks, every), [f"rank {number}" for number in range(0, found.ranks, every)])
    drawn = bars.barh(range(found.ranks), found.of_ranks, 0.2, color=COLOURS[WHOLE])
    bars.bar_label(drawn, padding=3, color=MUTED)
    bars.set_title("tiles computed", fontsize="medium", color=MUTED, loc="left")
    bars.set_xticks([])
    bars.margins(x=0.4)
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


def _mosaic(found: CallAnalysis) -> np.ma.MaskedArray:
    """All panels as one image of cells, with masked gaps between them."""
    cells = max(8, min(64, 512 // max(found.ranks, len(found.hops))))
    gap = max(1, cells // 16)
    rows, columns = (min(cells, tiles) for tiles in found.states.shape[2:])
    across, down = -(-cells // columns), -(-cells // rows)
    image = [
        [np.kron(shrunk(states, rows, columns), np.ones((down, across))) for states in of_rank]
        for of_rank in found.states
    ]
    return np.ma.masked_less(np.block([[np.pad(x, gap, constant_values=-1) for x in row] for row in image]), 0)


def _label_hops(found: CallAnalysis, axes: Any, wide: bool) -> None:
    """Above each column its hop and whose keys they are; below, what is sent during the hop."""
    every, names = (1 if wide else 4), [f"{hop.number}" for hop in found.hops]
    sent: dict[float, str] = {}
    if wide:
        whose = [f"keys of rank {rank(-hop.offset)}" if hop.offset else "own keys" for hop in found.hops]
        names = [f"hop {name}\n{keys}" for name, keys in zip(names, whose, strict=True)]
        ways = max(hop.ways for hop in found.hops)
        for column, hop in enumerate(found.hops):
            if hop.offset >= 0 and ways * hop.number < len(found.forward):
                message = found.forward[ways * hop.number]
                words = f"{contents(message)} {amount(message.bytes)} \N{RIGHTWARDS ARROW}"
                sent[column + 0.5] = f"2 x {words}" if ways == 2 else words
    else:
        axes.set_title("hop", fontsize="medium", color=MUTED, loc="left")
    axes.set_xticks(range(0, len(names), every), names[::every])
    axes.xaxis.tick_top()
    below = axes.secondary_xaxis("bottom")
    below.set_xticks(list(sent), list(sent.values()), color=MUTED)
    below.tick_params(length=0)
    below.spines[:].set_visible(False)
