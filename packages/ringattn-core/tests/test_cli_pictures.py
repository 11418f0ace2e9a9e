# SPDX-License-Identifier: Apache-2.0
"""Promises of what `ringattn explain` shows: pictures, tables and JSON say the same as the explanation."""

import dataclasses
import json
import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from ringattn_core.backends import discovery
from ringattn_core.cli import explaining, svg, table
from ringattn_core.cli.explanation import MASKED, SKIPPED, WHOLE, Explanation
from ringattn_core.cli.main import main
from ringattn_core.cli.picture import shrunk
from ringattn_core.cli.report import report
from ringattn_core.cli.request import Request
from ringattn_core.cli.scene import COLOURS, Words, rectangles, scene
from ringattn_core.cli.screen import Screen
from ringattn_core.contract.backend import Backend
from ringattn_core.contract.features import Feature, Support

STATES = arrays(
    np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=st.sampled_from([SKIPPED, MASKED, WHOLE])
)
CALL = ["explain", "--query", "1,64,4,8", "--ring", "4", "--causal", "--tile", "4,4"]
ESCAPE = re.compile(r"\x1b\[[\d;]*m")


def explained(ring: int = 4, tokens: int = 64, tile: tuple[int, int] = (4, 4), **options: Any) -> Explanation:
    shape = (1, tokens, 4, 8)
    return explaining.explain(Request(shape, shape, shape, ring, causal=True, **options), "cpu", tile=tile)


@pytest.fixture(scope="module")
def found() -> Explanation:
    return explained()


def text(found: Explanation, **screen: Any) -> str:
    return "\n".join(report(found, Screen(**screen)))


@given(STATES, st.integers(1, 12), st.integers(1, 12))
def test_a_cell_is_whole_or_skipped_only_where_all_its_tiles_are(states, rows: int, columns: int) -> None:
    cells = shrunk(states, rows, columns)
    assert cells.shape == (rows, columns)
    covered = np.zeros(states.shape, int)
    for row in range(rows):
        for column in range(columns):
            part = states[_span(row, rows, states.shape[0]), _span(column, columns, states.shape[1])]
            covered[_span(row, rows, states.shape[0]), _span(column, columns, states.shape[1])] += 1
            assert cells[row, column] == (part.flat[0] if (part == part.flat[0]).all() else MASKED)
    assert covered.all(), "a tile is in no cell"


def _span(cell: int, cells: int, tiles: int) -> slice:
    first, following = cell * tiles // cells, (cell + 1) * tiles // cells
    return slice(first, max(following, first + 1))


@given(STATES)
def test_rectangles_cover_what_is_chosen_once_and_nothing_else(states) -> None:
    drawn = np.zeros(states.shape, int)
    for upper, lower, left, right in rectangles(states == WHOLE):
        drawn[upper:lower, left:right] += 1
    np.testing.assert_array_equal(drawn, states == WHOLE)


def test_the_svg_draws_the_tiles_of_every_rank_and_hop(found: Explanation) -> None:
    root = ElementTree.fromstring(svg.written(scene(found)))
    boxes = [
        (path.get("fill"), *map(float, numbers))
        for path in root.iterfind("{*}path")
        for numbers in re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)v([\d.]+)h-", path.get("d"))
    ]
    panels = [box[1:] for box in boxes if box[0] == COLOURS[SKIPPED] and box[3] > 20]
    assert len(panels) == found.ranks * len(found.hops)
    for number, (x, y, size, _) in enumerate(panels):
        drawn = np.full(found.states.shape[2:], SKIPPED)
        tile = size / len(drawn)
        for state in (MASKED, WHOLE):
            for colour, *place in boxes:
                if colour == COLOURS[state] and x <= place[0] < x + size and y <= place[1] < y + size:
                    column, row, wide, tall = np.rint(np.subtract(place, (x, y, 0, 0)) / tile).astype(int)
                    drawn[row : row + tall, column : column + wide] = state
        np.testing.assert_array_equal(drawn, found.states[divmod(number, len(found.hops))])
    words = [item.text for item in root.iterfind("{*}text")]
    for word in ("rank 3", "hop 3", "own keys", "keys of rank r - 3", *map(str, found.of_ranks)):
        assert word in words


def test_the_svg_escapes_its_words(found: Explanation) -> None:
    drawn = dataclasses.replace(scene(found), title="<a & b>")
    assert ElementTree.fromstring(svg.written(drawn))[0].text == "<a & b>"


def test_in_a_file_the_picture_is_ascii(found: Explanation) -> None:
    said = text(found)
    assert said.isascii() and max(map(len, said.splitlines())) <= 100
    panels = [line for line in said.splitlines() if re.fullmatch(r"(rank \d)? +([.+#]{16} ?){4}", line)]
    assert len(panels) == 4 * 8
    for rank in range(4):
        for number in range(4):
            drawn = [line[8:].split()[number] for line in panels[8 * rank : 8 * rank + 8]]
            assert drawn == _lettered(shrunk(found.states[rank, number], 8, 16))


def _lettered(cells: np.ndarray) -> list[str]:
    return ["".join({SKIPPED: ".", MASKED: "+", WHOLE: "#"}[cell] for cell in row) for row in cells.tolist()]


def test_on_a_terminal_the_picture_has_blocks_and_colour_as_far_as_it_may(found: Explanation) -> None:
    coloured, plain = text(found, blocks=True, colour=True), text(found, blocks=True)
    assert "▀" in coloured and "\x1b[" in coloured
    assert "█" in plain and "·" in plain and "\x1b" not in plain
    assert max(len(ESCAPE.sub("", line)) for line in coloured.splitlines()) <= 100


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("ring", [1, 2, 16, 64])
def test_the_picture_fits_the_width_of_the_terminal(ring: int, width: int) -> None:
    found = explained(ring, 256)
    picture = text(found, width=width)
    picture = picture[picture.index("Tiles that") :].split("\n\n", 1)[1]
    assert max(map(len, picture[: picture.index("tiles are computed")].splitlines()[:-1])) <= width
    assert picture.count("rank 0 ") >= 1


def test_a_large_ring_shows_tenths_and_counts_hop_by_hop() -> None:
    found = explained(64, 1024)
    said = text(found)
    rows = [line.split() for line in said.splitlines() if re.match(r"rank \d+ +[\d.#]+$", line)]
    assert [row[1] for row in rows] == [str(n) for n in range(64)]
    drawn = [row[2] for row in rows]
    assert all(line == "6" + "#" * rank + "." * (63 - rank) for rank, line in enumerate(drawn)), drawn[:3]
    assert re.search(r"least busy rank +mean +busiest rank", said)


def test_the_table_of_tiles_has_the_counts_of_each_rank_and_hop(found: Explanation) -> None:
    lines = text(found).splitlines()
    for rank in range(4):
        wanted = [f"rank {rank}", *(str(hop.tiles[rank]) for hop in found.hops), str(found.of_ranks[rank])]
        assert any(re.split(r" {2,}", line) == wanted for line in lines), wanted
    assert any(line.split("  ")[0] == "keys of" and line.endswith("r - 2  r - 3") for line in map(str.rstrip, lines))
    assert found.of_ranks == (10, 26, 42, 58) and found.slowest == 58
    said = " ".join(text(found).split())
    assert "53% of all 256 tiles are computed" in said and "ranks are busy 59% of the time" in said


def test_both_ways_round_are_columns_of_one_hop_and_count_half() -> None:
    found, one_way = explained(layout="zigzag", two_way=True), explained(layout="zigzag")
    said = text(found)
    heads = ["tiles", "hop 0", *(f"hop {number}" for number in (1, 1, 2, 2, 3, 3)), "sum"]
    whose = ["keys of", "r", "r - 1", "r + 1", "r - 2", "r + 2", "r - 3", "r + 3"]
    lines = [re.split(r" {2,}", line) for line in said.splitlines()]
    assert heads in lines and whose in lines and "each column is of half of the heads" in said
    assert found.of_ranks == one_way.of_ranks and found.slowest == one_way.slowest
    assert re.search(r"^forward +3 +K,V +to rank r \+ 1 .*\nforward +3 +K,V +to rank r - 1 ", said, re.MULTILINE)
    words = [item.text for item in scene(found).items if isinstance(item, Words)]
    assert {"keys of rank r - 1", "keys of rank r + 1", "2 x K,V 1.0 KiB \N{RIGHTWARDS ARROW}"} <= set(words)


def test_as_json_it_says_what_the_explanation_holds(found: Explanation, capsys) -> None:
    assert main([*CALL, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said == json.loads(json.dumps(found.to_dict()))
    assert said["choice"] == "xla" and said["request"]["query"] == [1, 64, 4, 8] and "states" not in said
    assert [hop["tiles"] for hop in said["hops"]] == [list(hop.tiles) for hop in found.hops]


def test_each_candidate_is_accepted_or_refused_with_the_reason_that_selection_gives(capsys) -> None:
    features = {feature: Support.FULL for feature in Feature if feature is not Feature.CAUSAL}
    for name, platforms in (("acausal", ("cpu",)), ("elsewhere", ("tpu",))):
        backend = Backend(name, 1, platforms, features, kernel="nowhere:KERNEL", priority=5)
        with discovery.registered(backend, object()):
            reasons = {candidate.name: candidate.reason for candidate in explained().candidates}
            assert reasons["xla"] is None
            assert ("CAUSAL (not declared)" if name == "acausal" else "it serves tpu, not cpu") in reasons[name]
            status = main([*CALL, "--backend", name])
            out = capsys.readouterr().out
            assert status == 1 and "none:" in out and "hop 3" in out, "the plan is core's, and is shown all the same"


def test_the_platform_and_an_ordered_fallback_can_be_named(capsys) -> None:
    backend = Backend("acausal", 1, ("tpu",), {}, kernel="nowhere:KERNEL", priority=5)
    with discovery.registered(backend, object()):
        assert main([*CALL, "--backend", "acausal,xla", "--platform", "tpu"]) == 0
    out = capsys.readouterr().out
    assert "Backends on tpu" in out and re.search(r"^    acausal .* it does not support BFLOAT16", out, re.MULTILINE)
    assert re.search(r"^->  xla .* runs this call$", out, re.MULTILINE)


def test_a_backend_with_a_ring_of_its_own_is_said_to_have_one() -> None:
    def ring(query: Any, key: Any, value: Any, **options: Any) -> Any: ...

    backend = Backend("own", 1, ("cpu",), dict.fromkeys(Feature, Support.FULL), ring="nowhere:ring", priority=5)
    with discovery.registered(backend, ring):
        found = explained()
    assert found.choice == "own" and found.own_ring and "own drives a ring of its own" in text(found)


def test_the_picture_is_written_where_it_is_asked_for(tmp_path: Path, capsys) -> None:
    assert main([*CALL, "--svg", str(tmp_path / "ring.svg")]) == 0
    assert ElementTree.parse(tmp_path / "ring.svg").getroot().tag.endswith("svg")
    pytest.importorskip("matplotlib")
    assert main([*CALL, "--png", str(tmp_path / "ring.png")]) == 0
    data = (tmp_path / "ring.png").read_bytes()
    drawn = scene(explained())
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(data[16:20]) == pytest.approx(2 * drawn.width, abs=2)


def test_without_matplotlib_a_png_is_refused_and_svg_is_named(monkeypatch, tmp_path: Path, capsys) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*CALL, "--png", str(tmp_path / "ring.png")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("ringattn explain: --png: needs matplotlib")
    assert "pip install matplotlib. Or use --svg" in err and not (tmp_path / "ring.png").exists()


@pytest.mark.parametrize(
    ("count", "said"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2**20 * 3 // 2, "1.5 MiB"), (2**60, "1024.0 PiB")],
)
def test_bytes_are_written_with_the_unit_that_leaves_a_small_number(count: int, said: str) -> None:
    assert table.amount(count) == said


def test_a_table_aligns_its_columns_and_wraps_the_last() -> None:
    rows = [("a", "1", "one two three four five six"), ("long", "22", "x")]
    assert list(table.lines(("k", "n", "words"), rows, right=" r", width=33)) == [
        "k      n  words",
        "a      1  one two three four five",
        "          six",
        "long  22  x",
    ]


def test_only_a_terminal_that_can_show_them_gets_blocks_and_colour(monkeypatch) -> None:
    class Stream:
        def __init__(self, terminal: bool, encoding: str):
            self.encoding, self.isatty = encoding, lambda: terminal

    monkeypatch.setenv("COLUMNS", "90")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert Screen.of(Stream(False, "utf-8")) == Screen(100)
    assert Screen.of(Stream(True, "utf-8")) == Screen(90, blocks=True, colour=True)
    assert Screen.of(Stream(True, "ascii")) == Screen(90)
    monkeypatch.setenv("NO_COLOR", "1")
    assert Screen.of(Stream(True, "utf-8")) == Screen(90, blocks=True)
    monkeypatch.setenv("TERM", "dumb")
    assert Screen.of(Stream(True, "utf-8")) == Screen(100)
