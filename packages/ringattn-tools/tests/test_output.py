# SPDX-License-Identifier: Apache-2.0
"""Promises of printing: columns are aligned, and numbers have units."""

from ringattn_tools import output
from ringattn_tools.output import Title, show


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


def test_brackets_and_colons_are_printed_as_they_are(capsys) -> None:
    for words in ("pip install 'jax[cuda13]'", "a [bold]b[/bold] :smile: 3"):
        show(words, Title(words), {words: ""}, [{words: "x"}])
        assert capsys.readouterr().out.splitlines() == [*[words] * 4, "x"]
