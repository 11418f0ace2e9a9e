# SPDX-License-Identifier: Apache-2.0
"""How a picture is written as SVG."""

from collections.abc import Iterator
from typing import Final
from xml.sax.saxutils import escape, quoteattr

from .scene import Area, Scene, Words

_FONTS: Final = "Inter, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


def written(scene: Scene) -> bytes:
    """A document that stands alone: no style sheet, no script, no font of its own."""
    return ("\n".join(_lines(scene)) + "\n").encode()


def _lines(scene: Scene) -> Iterator[str]:
    width, height = f"{scene.width:g}", f"{scene.height:g}"
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        f'role="img" font-family="{_FONTS}">'
    )
    yield f"<title>{escape(scene.title)}</title>"
    yield f'<rect width="{width}" height="{height}" fill="#ffffff"/>'
    for item in scene.items:
        yield _area(item) if isinstance(item, Area) else _words(item)
    yield "</svg>"


def _area(area: Area) -> str:
    drawn = "".join(f"M{box.x:g} {box.y:g}h{box.width:g}v{box.height:g}h{-box.width:g}z" for box in area.boxes)
    return f'<path fill="{area.colour}" shape-rendering="crispEdges" d="{drawn}"/>'


def _words(words: Words) -> str:
    weight = ' font-weight="600"' if words.bold else ""
    anchor = "" if words.anchor == "start" else f" text-anchor={quoteattr(words.anchor)}"
    place = f'x="{words.x:g}" y="{words.y:g}" font-size="{words.size:g}" fill="{words.colour}"'
    return f"<text {place}{anchor}{weight}>{escape(words.text)}</text>"
