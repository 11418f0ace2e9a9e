# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of docs/gallery.md: what each mask shows, where each layout puts tokens. Run it to redraw them."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from ringattn_core import MaskInfo, masks, ring_attention, to_layout

PAGE = Path(__file__).parent / "gallery.md"
SHOWN = re.compile(r"!\[[^\]]*\]\((pictures/\S+\.svg)\)[\s|]+`([^`]*)`")
TOKENS, RANKS = 24, 4
SEEN, HIDDEN, LINE = "#1c5a9e", "#e9edf1", "#c8ccd2"
OF_RANK = ("#7fb2e5", "#f4b56a", "#8ccf9b", "#d59ad6")
NAMES = {"MaskInfo": MaskInfo, "masks": masks, "jnp": jnp}


def shown() -> list[tuple[Path, str]]:
    """Each picture of the gallery, with the options of the call that it shows, as the page has them."""
    return [(PAGE.parent / file, code.replace("\\|", "|")) for file, code in SHOWN.findall(PAGE.read_text())]


def seen(options: dict[str, Any]) -> np.ndarray:
    """Which keys each query sees, `[B, T, S]`: where the output of equal scores is not 0, with unit vectors as values.

    There are as many batch rows as in the `mask_info` of the options; one without.
    """
    rows = max((len(x) for x in jax.tree.leaves(options.get("mask_info")) if x.ndim > 1), default=1)
    x = jnp.zeros((rows, TOKENS, 1, TOKENS))
    value = jnp.broadcast_to(jnp.eye(TOKENS)[:, None], x.shape)
    return np.asarray(ring_attention(x, x, value, **options)[:, :, 0] > 0)


def draw(code: str, path: Path) -> None:
    """Draws the call with these options, as code, to an SVG."""
    options = eval(f"dict({code})", NAMES)
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "ringattn", "font.size": 8}):
        figure = of_layout(options["layout"]) if "layout" in options else of_mask(seen(options))
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})


def of_mask(pairs: np.ndarray) -> Figure:
    """The pairs `[B, T, S]`, a panel for each batch row."""
    rows = len(pairs)
    figure = Figure((0.2 + 1.5 * rows, 1.75), layout="constrained", facecolor="white")
    for number, axes in enumerate(figure.subplots(1, rows, squeeze=False)[0]):
        axes.imshow(pairs[number], ListedColormap([HIDDEN, SEEN]), vmin=0, vmax=1, interpolation="none")
        axes.set_xlabel("keys" if rows == 1 else f"keys of row {number}")
        axes.set_ylabel("" if number else "queries")
        _bare(axes)
    return figure


def of_layout(layout: str) -> Figure:
    """The token that each place of the array holds, coloured by rank; below, a causal mask in that order."""
    order = to_layout(np.arange(TOKENS), layout, RANKS, 0)
    rank_of_place = np.arange(TOKENS) // (TOKENS // RANKS)
    figure = Figure((4.2, 3.6), layout="constrained", facecolor="white")
    strip, below = figure.subplots(2, 1, height_ratios=(1, 8))
    strip.imshow(rank_of_place[None], ListedColormap(OF_RANK), interpolation="none", aspect="auto")
    for place, token in enumerate(order):
        strip.text(place, 0, str(token), ha="center", va="center", fontsize=7)
    centres = (np.arange(RANKS) + 0.5) * TOKENS / RANKS - 0.5
    strip.set_xticks(centres, [f"rank {rank}" for rank in range(RANKS)])
    strip.xaxis.tick_top()
    strip.tick_params(length=0)
    strip.set_yticks([])
    strip.spines[:].set_visible(False)
    causal = order[None] <= order[:, None]
    below.imshow(np.where(causal, rank_of_place[:, None], -1), ListedColormap((HIDDEN, *OF_RANK)), interpolation="none")
    for edge in np.arange(1, RANKS) * TOKENS / RANKS - 0.5:
        below.axhline(edge, color="white", linewidth=1.5)
        below.axvline(edge, color="white", linewidth=1.5)
    below.set_xlabel("keys of rank 0, 1, 2, 3")
    below.set_ylabel("queries of rank 3, 2, 1, 0")
    _bare(below)
    return figure


def _bare(axes: Any) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_color(LINE)


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    for path, code in shown():
        draw(code, path)
