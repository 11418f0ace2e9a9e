# SPDX-License-Identifier: Apache-2.0
"""How a picture is written as PNG, where matplotlib is installed."""

import io
from typing import Any, Final

from ..errors import InputError
from .scene import Area, Scene

_DOTS: Final = 72
_SCALE: Final = 2
_ALIGNED: Final = {"start": "left", "middle": "center", "end": "right"}


def written(scene: Scene) -> bytes:
    """The same picture at two dots a pixel."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PolyCollection
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError(
            "--png",
            f"needs matplotlib ({error})",
            "Install it: pip install matplotlib. Or use --svg, which needs nothing",
        ) from error
    figure = Figure(figsize=(scene.width / _DOTS, scene.height / _DOTS), dpi=_DOTS * _SCALE, facecolor="white")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, scene.width), ylim=(scene.height, 0))
    axes.axis("off")
    for item in scene.items:
        if isinstance(item, Area):
            corners = [
                [(box.x + x * box.width, box.y + y * box.height) for x, y in ((0, 0), (1, 0), (1, 1), (0, 1))]
                for box in item.boxes
            ]
            axes.add_collection(PolyCollection(corners, facecolors=item.colour, linewidths=0, antialiaseds=False))
        else:
            weight = "bold" if item.bold else "normal"
            # A size of 1 is a pixel of the scene, as in SVG; matplotlib's own font is a little wider.
            axes.text(
                item.x, item.y, item.text, fontsize=0.92 * item.size, color=item.colour, weight=weight,
                ha=_ALIGNED[item.anchor], va="baseline",
            )  # fmt: skip
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=_DOTS * _SCALE)
    return buffer.getvalue()
