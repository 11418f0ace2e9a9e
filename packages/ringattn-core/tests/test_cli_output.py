# SPDX-License-Identifier: Apache-2.0
"""Promises of printing: aligned tables with the extra `cli`; without it plain tables, and one line that names it."""

import sys
from pathlib import Path

import pytest
from ringattn_core.cli import output
from ringattn_core.cli.main import main
from ringattn_core.cli.output import Bytes, Title, show

CALL = ["explain", "--query", "1,64,4,8", "--ring", "4", "--causal"]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hides the libraries of the extra `cli`."""
    for library in ("rich", "matplotlib"):
        for name in [name for name in sys.modules if name.partition(".")[0] == library]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, library, None)


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


def test_without_the_extra_a_table_is_text_with_tabs(bare, capsys) -> None:
    show(Title("title"), "sentence", [{"k": "a", "n": 1}, {"k": "b", "n": 2}], {"c": 3})
    assert capsys.readouterr().out == "title\nsentence\nk\tn\na\t1\nb\t2\nc\t3\n"


@pytest.mark.parametrize("command", [["list"], ["info", "xla"], ["doctor"], CALL], ids=lambda command: command[0])
def test_without_the_extra_a_command_says_the_same_words(command, monkeypatch, capsys) -> None:
    monkeypatch.setattr(output, "PAGE", 2000)
    assert main(command) == 0
    rich = capsys.readouterr().out.split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "rich", None)
        patch.setitem(sys.modules, "rich.console", None)
        assert main(command) == 0
    assert capsys.readouterr().out.split() == rich


@pytest.mark.parametrize("kind", ["svg", "png"])
def test_without_the_extra_a_picture_is_refused_in_one_line(kind: str, bare, tmp_path: Path, capsys) -> None:
    assert main([*CALL, f"--{kind}", str(tmp_path / "ring")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"ringattn explain: --{kind}: needs matplotlib")
    assert (
        err.endswith('In a clone of the repository, run pip install "./packages/ringattn-core[cli]"\n')
        and not (tmp_path / "ring").exists()
    )
