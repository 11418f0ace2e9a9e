# SPDX-License-Identifier: Apache-2.0
"""The picture of a call analysis: which tiles each rank computes at each hop, as text, as SVG or as PNG."""

from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import UInt8
from ringattn_core.errors import InputError

from .analysis import MASKED, SKIPPED, WHOLE, CallAnalysis
from .output import PAGE
from .report import balance, described, title, totals

KINDS: Final = ("svg", "png")
WORDS: Final = {WHOLE: "computed without a mask", MASKED: "masked, or in part skipped", SKIPPED: "skipped"}
"""The legend: what each state of a cell means. A cell may stand for several tiles."""
COLOURS: Final = {SKIPPED: "#e9edf1", MASKED: "#86b6e4", WHOLE: "#1c5a9e"}
MUTED: Final = "#5b6570"
LETTERS: Final = {SKIPPED: ".", MASKED: "+", WHOLE: "#"}
_ROWS: Final = 8
_LINES: Final = 44
"""The most lines of one panel (`_ROWS`), and of the whole picture (`_LINES`), as text."""


def shrunk(
    states: UInt8[np.ndarray, "... q_tiles kv_tiles"], rows: int, columns: int
) -> UInt8[np.ndarray, "... rows columns"]:
    """Shrinks the tiles to a grid of cells. A cell is `WHOLE` or `SKIPPED` if all its tiles are, else `MASKED`.

    With fewer tiles than cells, a tile fills several cells.
    """
    down, across = (np.arange(cells) * n // cells for cells, n in zip((rows, columns), states.shape[-2:], strict=True))
    lowest, highest = (pool.reduceat(pool.reduceat(states, down, -2), across, -1) for pool in (np.minimum, np.maximum))
    return np.where(lowest == highest, lowest, MASKED).astype(np.uint8)


def text(analysis: CallAnalysis) -> str:
    """The picture as text: a row of panels for each rank and a column for each hop, with a letter for each cell.

    In a panel, queries go down and keys across. A ring too large for `PAGE` and `_LINES` gives a sentence instead.
    """
    hops, margin = len(analysis.keys_of), len(f"rank {analysis.ranks - 1} ")
    rows = min(_ROWS, _LINES // analysis.ranks - 1, ((PAGE - margin + 1) // hops - 1) // 2)
    if rows < 2:
        return "The ring is too large for a picture here; --svg and --png draw it."
    lines = ["   ".join(f"{LETTERS[state]} {word}" for state, word in WORDS.items()), ""]
    lines.append(" " * margin + " ".join(f"hop {number}".ljust(2 * rows) for number in range(hops)))
    for number, of_rank in enumerate(shrunk(analysis.states, rows, 2 * rows)):
        for row, cells in enumerate(of_rank.swapaxes(0, 1).tolist()):
            name = "" if row else f"rank {number}"
            lines.append(name.ljust(margin) + " ".join("".join(LETTERS[x] for x in panel) for panel in cells))
        lines.append("")
    return "\n".join(lines)


def save(analysis: CallAnalysis, path: Path, kind: str) -> None:
    """Writes the picture to the file `path` in the format `kind`, "svg" or "png"."""
    import matplotlib as mpl  # takes half a second, which other commands need not wait for

    metadata = {"Title": title(analysis)} | ({"Date": None, "Creator": None} if kind == "svg" else {"Software": None})
    # A fixed salt makes equal calls write equal files. The font type "none" keeps text as text, not as outlines.
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ringattn", "font.size": 9}):
        try:
            figure(analysis).savefig(path, format=kind, dpi=150, metadata=metadata)
        except OSError as error:
            raise InputError(f"--{kind}", f"cannot write {path}: {error.strerror}", "Name another file") from error


def figure(analysis: CallAnalysis) -> Any:
    """The picture as a matplotlib figure: a panel for each rank and hop, and beside them a bar of each rank's tiles."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    hops = len(analysis.keys_of)
    side = min(1.4, 13 / max(hops, analysis.ranks))
    beside = max(2, hops // 8)
    size = max(7.5, side * (hops + beside) + 1), side * analysis.ranks + 2.4
    made = Figure(size, layout="constrained", facecolor="white")
    tiles, bars = made.subplots(1, 2, sharey=True, width_ratios=(hops, beside))
    colours = ListedColormap([COLOURS[state] for state in (SKIPPED, MASKED, WHOLE)])
    extent = (-0.5, hops - 0.5, analysis.ranks - 0.5, -0.5)
    tiles.imshow(_mosaic(analysis), colours, vmin=0, vmax=2, interpolation="none", extent=extent, aspect="auto")
    named = range(0, hops, _every(hops))
    names = [f"hop {number}\nkeys of rank {analysis.keys_of[number]}" if side > 1 else f"{number}" for number in named]
    tiles.set_xticks(named, names)
    tiles.xaxis.tick_top()
    tiles.set_title("" if side > 1 else "hop", fontsize="medium", color=MUTED, loc="left")
    named = range(0, analysis.ranks, _every(analysis.ranks))
    tiles.set_yticks(named, [f"rank {number}" for number in named])
    bars.hlines(range(analysis.ranks), 0, analysis.tiles_of_ranks, COLOURS[WHOLE], linewidth=72 * side / 5)
    for number in named:
        count = analysis.tiles_of_ranks[number]
        bars.annotate(f"{count}", (count, number), (3, 0), textcoords="offset points", va="center", color=MUTED)
    bars.set_title("tiles computed", fontsize="medium", color=MUTED, loc="left")
    bars.set_xticks([])
    bars.set_xlim(0, 1.5 * max(1, *analysis.tiles_of_ranks))
    for axes in (tiles, bars):
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    by = f"by {analysis.choice}" if analysis.choice else "by no installed backend"
    each = "each panel is {} x {} tiles of {} queries by {} keys".format(*analysis.states.shape[2:], *analysis.tile)
    made.suptitle(f"{title(analysis)}\n{described(analysis)}\n{by} on {analysis.platform}; {each}", x=0.01, ha="left")
    words, patches = (
        f"{balance(analysis)}\n{totals(analysis)}",
        [Patch(color=COLOURS[x], label=WORDS[x]) for x in WORDS],
    )
    made.legend(handles=patches, title=words, alignment="left", loc="outside lower left", ncols=3, frameon=False)
    return made


def _every(count: int) -> int:
    """The distance between labelled ranks or hops, of `count`: 1 up to 32, then so that 16 to 32 have labels."""
    return 1 if count <= 32 else count // 16


def _mosaic(analysis: CallAnalysis) -> np.ma.MaskedArray:
    """All panels as one image with a number for each cell. Gaps between panels, if there is room, are masked out."""
    panels, gaps = max(analysis.ranks, len(analysis.keys_of)), 255
    cells = max(1, min(64, 512 // panels), min(2, 2048 // panels))
    gap = -(-cells // 16) if cells >= 8 else 0
    rows, columns = (min(cells, tiles) for tiles in analysis.states.shape[2:])
    states = shrunk(analysis.states, rows, columns).repeat(-(-cells // rows), 2).repeat(-(-cells // columns), 3)
    apart = np.pad(states, ((0, 0), (0, 0), (gap, gap), (gap, gap)), constant_values=gaps)
    return np.ma.masked_equal(np.concatenate(np.concatenate(apart, 1), 1), gaps)
