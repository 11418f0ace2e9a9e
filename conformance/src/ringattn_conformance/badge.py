# SPDX-License-Identifier: Apache-2.0
"""The badge of a report: an SVG that says whether, and for what, a backend is certified."""

from typing import Final
from xml.sax.saxutils import escape

from . import summary
from .schema import BackendReport, Report

HEIGHT: Final = 20
PADDING: Final = 7
SIZE: Final = 11
LEFT: Final = "ringattn"
GREY: Final = "#4a4f57"
CERTIFIED: Final = "#1e7b4a"
WITH_EXPECTED: Final = "#8a6d00"
FAILED: Final = "#b3261e"
NOT_JUDGED: Final = "#6b6f76"
_NARROW: Final = frozenset("fijlrtI.,:;|!'()[] -1")
_WIDE: Final = frozenset("mwMWGOQ%@")


def svg(name: str, backend: BackendReport, report: Report) -> str:
    """The badge as SVG text; its title is the full verdict."""
    right, colour = _message(backend, report)
    whole = f"{name} {backend['version']}: {summary.verdict(backend)}"
    left_text, right_text = _width(LEFT), _width(right)
    left, width = left_text + 2 * PADDING, left_text + right_text + 4 * PADDING
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{HEIGHT}" role="img"\
 aria-label="{escape(whole, {'"': "&quot;"})}">
<title>{escape(whole)}</title>
<clipPath id="shape"><rect width="{width}" height="{HEIGHT}" rx="4"/></clipPath>
<g clip-path="url(#shape)">
<rect width="{left}" height="{HEIGHT}" fill="{GREY}"/>
<rect x="{left}" width="{width - left}" height="{HEIGHT}" fill="{colour}"/>
</g>
<g fill="#fff" font-family="Verdana,DejaVu Sans,Geneva,sans-serif" font-size="{SIZE}">
{_text(LEFT, PADDING, left_text)}
{_text(right, left + PADDING, right_text)}
</g>
</svg>
"""


def _message(backend: BackendReport, report: Report) -> tuple[str, str]:
    """The words and the colour of the right half. The words alone distinguish all cases."""
    certificate, factor = backend["certificate"], report["options"]["tolerance_factor"]
    supported = sum(feature["support"] == "FULL" for feature in backend["features"].values())
    stretched = f", tolerances x{factor:g}" if factor != 1 else ""
    expected = len(backend["expected_failures"])
    if certificate["given"]:
        but = f", {expected} expected failure{'s' * (expected > 1)}" if expected else ""
        message = f"{certificate['tier']}: certified, {supported} feature{'s' * (supported != 1)}{but}{stretched}"
        return message, WITH_EXPECTED if expected else CERTIFIED
    failed = len(backend["failed"]) + len(backend["unexpected_passes"]) + len(report["crashes"])
    if failed:
        return f"{certificate['tier']}: {failed} failed{stretched}", FAILED
    return f"{certificate['tier']}: not certified{stretched}", NOT_JUDGED


def _text(text: str, x: int, width: int) -> str:
    """A text that the viewer stretches to `width` in whatever font it has."""
    return f'<text x="{x}" y="14" textLength="{width}" lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'


def _width(text: str) -> int:
    return round(sum(4.2 if c in _NARROW else 10.2 if c in _WIDE else 7.0 for c in text))
