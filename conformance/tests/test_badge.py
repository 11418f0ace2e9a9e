# SPDX-License-Identifier: Apache-2.0
"""The badge: well-formed, as wide as its words, and never greener than the certificate."""

from typing import Any
from xml.etree import ElementTree

import pytest
from ringattn_conformance import badge
from sample_reports import report

SPACE = "{http://www.w3.org/2000/svg}"


def _drawn(**changes: Any) -> ElementTree.Element:
    found = report(**changes)
    return ElementTree.fromstring(badge.svg("acme", found["backends"]["acme"], found))


def _words(image: ElementTree.Element) -> str:
    return [text.text or "" for text in image.iter(f"{SPACE}text")][1]


def _colour(image: ElementTree.Element) -> str | None:
    return list(image.iter(f"{SPACE}rect"))[-1].get("fill")


@pytest.mark.parametrize(
    ("changes", "words", "colour"),
    [
        ({}, "core: certified, 1 feature", badge.CERTIFIED),
        ({"tier": "full"}, "full: certified, 1 feature", badge.CERTIFIED),
        ({"expected_failures": {"a": "hard"}}, "core: certified, 1 feature, 1 expected failure", badge.WITH_EXPECTED),
        ({"failed": ["a", "b"], "deselected": ["c"]}, "core: 2 failed", badge.FAILED),
        ({"crashes": ["a"]}, "core: 1 failed", badge.FAILED),
        ({"deselected": ["a"]}, "core: not certified", badge.NOT_JUDGED),
        ({"tolerance_factor": 2.5}, "core: not certified, tolerances x2.5", badge.NOT_JUDGED),
        ({"tolerance_factor": 0.5}, "core: certified, 1 feature, tolerances x0.5", badge.CERTIFIED),
    ],
)
def test_its_words_and_its_colour_are_those_of_the_verdict(changes: dict[str, Any], words: str, colour: str):
    image = _drawn(**changes)
    assert _words(image) == words
    assert _colour(image) == colour


def test_its_title_is_the_whole_verdict():
    image = _drawn(deselected=["a"])
    title = next(image.iter(f"{SPACE}title")).text
    assert title == image.get("aria-label") == "acme 1.2.3: NOT CERTIFIED for the core tier: 1 test deselected"


def test_the_words_fit_between_its_edges():
    image = _drawn(expected_failures={"a": "hard"}, tolerance_factor=0.25)
    for text in image.iter(f"{SPACE}text"):
        assert int(text.get("x", 0)) + int(text.get("textLength", 0)) <= int(image.get("width", 0)) - badge.PADDING + 1


def test_names_cannot_break_it():
    found = report()
    found["backends"]["acme"]["version"] = '1"<&>'
    image = ElementTree.fromstring(badge.svg("<a>", found["backends"]["acme"], found))
    assert '<a> 1"<&>: CERTIFIED' in (image.get("aria-label") or "")
