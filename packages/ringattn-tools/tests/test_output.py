# SPDX-License-Identifier: Apache-2.0
"""Promises of printing: columns are aligned, and numbers have units."""

import json

import pytest
from ringattn_tools import output
from ringattn_tools.output import Bytes, Seconds, Title, show


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**20 * 3 // 2, "1.5 MiB"), (2**60, "1024.0 PiB")],
)
def test_bytes_are_written_with_the_unit_that_leaves_a_small_number(count: int, said: str) -> None:
    assert str(output.Bytes(count)) == said


def test_a_table_aligns_its_columns_and_wraps_at_the_width_of_a_page(capsys, monkeypatch) -> None:
    monkeypatch.setattr(output, "PAGE", 37)
    rows = [("a", 1, True, "one two three four five six"), ("long", 22, False, "x"), ("b", None, False, "")]
    show([dict(zip(("k", "n", "chosen", "words"), row, strict=True)) for row in rows])
    assert capsys.readouterr().out.splitlines() == [
        "k      n      words",
        "a      1  ->  one two three four five",
        "              six",
        "long  22      x",
        "b      -",
    ]


def test_facts_and_bytes_are_words(capsys) -> None:
    show({"a": True, "b": None, "c": ("x", "y"), "d": ()}, [{"bytes": Bytes(2048)}])
    lines = ["a  yes", "b  -", "c  x, y", "d  -", "  bytes", "2.0 KiB"]
    assert capsys.readouterr().out.splitlines() == lines


def test_brackets_and_colons_are_printed_as_they_are(capsys) -> None:
    for words in ("pip install 'jax[cuda13]'", "a [bold]b[/bold] :smile: 3"):
        show(words, Title(words), {words: ""}, [{words: "x"}])
        assert capsys.readouterr().out.splitlines() == [*[words] * 4, "x"]


def test_durations_have_a_unit_and_are_numbers_in_json() -> None:
    assert [str(Seconds(x)) for x in (2.0, 0.0123, 4.5e-6, 0.0)] == ["2 s", "12.3 ms", "4.5 us", "0 us"]
    assert json.dumps(Seconds(0.5)) == "0.5"
