# SPDX-License-Identifier: Apache-2.0
"""Promises of what `ringattn explain` shows: pictures, tables and JSON agree with the analysis of the call."""

import base64
import io
import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from matplotlib.colors import to_rgb
from ringattn_core.backends import discovery
from ringattn_core.contract.backend import Backend
from ringattn_core.contract.features import Feature
from ringattn_tools import picture, report
from ringattn_tools.abstract_call import AbstractCall
from ringattn_tools.analysis import MASKED, SKIPPED, WHOLE, CallAnalysis, analyse
from ringattn_tools.main import main, parsed

STATES = arrays(
    np.uint8, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=st.sampled_from([SKIPPED, MASKED, WHOLE])
)
CALL = ["explain", "--query", "1,64,4,8", "--ring", "4", "--causal", "--tile", "4,4"]


def explained(ring: int = 4, tokens: int = 64, words: str = "", tile: Any = (4, 4)) -> CallAnalysis:
    call = parsed(f"explain --query 1,{tokens},4,8 --ring {ring} --causal {words}".split())
    return analyse(AbstractCall.of(call), "cpu", tile=tile)


@pytest.fixture(scope="module")
def found() -> CallAnalysis:
    return explained()


def text(found: CallAnalysis, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    report.report(found, picture.text(found))
    return capsys.readouterr().out


@given(STATES, st.integers(1, 12), st.integers(1, 12))
def test_a_cell_is_whole_or_skipped_only_where_all_its_tiles_are(states, rows: int, columns: int) -> None:
    cells = picture.shrunk(states, rows, columns)
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


def image_of(svg: Path) -> np.ndarray:
    """The RGBA pixels of the only image in the picture."""
    (image,) = ElementTree.parse(svg).getroot().iter("{http://www.w3.org/2000/svg}image")
    assert "pixelated" in image.get("style", ""), "a viewer would blur the tiles"
    data = image.get("{http://www.w3.org/1999/xlink}href", "").partition("base64,")[2]
    return matplotlib.image.imread(io.BytesIO(base64.b64decode(data)))


def test_the_image_has_the_tiles_of_every_rank_and_hop(found: CallAnalysis, tmp_path: Path) -> None:
    picture.save(found, tmp_path / "ring.svg", "svg")
    image = image_of(tmp_path / "ring.svg")
    panel = len(image) // found.ranks
    for rank, number in np.ndindex(found.ranks, found.ranks):
        pixels = image[rank * panel : (rank + 1) * panel, number * panel : (number + 1) * panel]
        opaque = np.flatnonzero(pixels[panel // 2, :, 3])
        assert opaque[0] > 0 and opaque[-1] < panel - 1, "there is no gap between panels"
        drawn = pixels[opaque[0] : opaque[-1] + 1, opaque[0] : opaque[-1] + 1, :3]
        colours = np.array([[to_rgb(picture.COLOURS[state]) for state in row] for row in found.states[rank, number]])
        size = len(drawn) // 4
        np.testing.assert_allclose(drawn, colours.repeat(size, 0).repeat(size, 1), atol=0.01)


def test_in_a_file_the_picture_is_ascii(found: CallAnalysis, capsys) -> None:
    said = text(found, capsys)
    assert said.isascii() and max(map(len, said.splitlines())) <= 100
    panels = [line for line in said.splitlines() if re.fullmatch(r"(rank \d)? +([.+#]{16} ?){4}", line)]
    assert len(panels) == 4 * 8
    for rank in range(4):
        for number in range(4):
            drawn = [line[7:].split()[number] for line in panels[8 * rank : 8 * rank + 8]]
            assert drawn == _lettered(picture.shrunk(found.states[rank, number], 8, 16))


def _lettered(cells: np.ndarray) -> list[str]:
    return ["".join({SKIPPED: ".", MASKED: "+", WHOLE: "#"}[cell] for cell in row) for row in cells.tolist()]


def test_the_tiles_of_a_large_ring_are_extremes_with_equal_hops_in_one_row(capsys, tmp_path: Path) -> None:
    found = explained(64, 1024)
    assert re.search(r"\n63 +r - 63 +0 +0.2 +16\n *sum +10 +514.0 +1018\n", text(found, capsys))
    assert re.search(r"\n1 to 63 +r - 1 to r - 63 +8 +8.0 +8\n", text(explained(64, 1024, "--layout zigzag"), capsys))
    full = report.as_json(found, full=True)["tiles"]
    assert [row["rank 63"] for row in full] == [10, *[16] * 63, 1018] and len(full) == 65
    picture.save(found, tmp_path / "ring.svg", "svg")
    assert image_of(tmp_path / "ring.svg").shape[0] >= 64 * 8


def test_each_candidate_is_accepted_or_refused_with_the_reason_that_selection_gives(capsys) -> None:
    features = frozenset(Feature) - {Feature.CAUSAL}
    for name, platforms in (("acausal", ("cpu",)), ("elsewhere", ("tpu",))):
        backend = Backend(name, 1, platforms, features, kernel="nowhere:KERNEL", priority=5)
        with discovery.registered(backend, object()):
            reasons = {row["name"]: row["answer"] for row in explained().backends}
            assert reasons["xla"] == "runs this call"
            assert ("CAUSAL (not declared)" if name == "acausal" else "it serves tpu, not cpu") in reasons[name]
            status = main([*CALL, "--backend", name])
            out = capsys.readouterr().out
            assert status == 1 and "none:" in out and "hop 3" in out, "the plan is core's, and is shown all the same"


@pytest.mark.parametrize(("tokens", "chosen"), [(8, "queries"), (32, "keys")])
def test_it_sends_what_is_fewer_bytes(capsys: pytest.CaptureFixture[str], tokens: int, chosen: str) -> None:
    call = f"explain --query 2,{tokens},4,16 --kv 64,2,8 --ring 4 --dtype bf16 --causal --query-offset 16"
    assert main(f"{call} --backend xla --json".split()) == 0
    rows = json.loads(capsys.readouterr().out)["prefill"]
    assert [row["send"] for row in rows if row["chosen"]] == [chosen]
    # Three other ranks; a token of the cache has 2 heads of 16 and 8, and one of the chunk 4 heads.
    assert {row["send"]: row["sent"] for row in rows} == {
        "keys": 3 * 2 * 16 * 2 * (16 + 8) * 2,
        "queries": 3 * 2 * tokens // 4 * 4 * (16 * 2 + 8 * 4 + 12),
    }


def test_a_choice_of_blocks_is_told_in_pairs_blocks_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    words = "explain --query 1,4096,16,8 --kv 4096,2 --ring 2 --causal --selected 4x64 --json"
    assert main(words.split()) == 0
    told = json.loads(capsys.readouterr().out)["selected"]
    assert told["blocks of the sequence"] == 64
    index = np.arange(4096)
    share = np.minimum(index + 1, 256).sum() / (index + 1).sum()
    assert told["pairs that are left"] == f"{100 * share:.2g}%"
    assert told["ids of one rank, one group for each key head"] == 2048 * 2 * 4 * 4
    assert told["bits of one rank and hop"] == 2048 * 2 * 4  # 32 blocks of a shard in a word
    row = next(row for row in told["visited"] if row["queries of a tile"] == 16)
    assert row["at least"] == 4 and row["independent choices"] == round(64 * (1 - (60 / 64) ** 16))
    assert main([word for word in words.split() if word != "--json"]) == 0
    assert "4 blocks of 64 keys for each query" in capsys.readouterr().out


@pytest.mark.parametrize("wrong", ["16", "0x4", "4x", "4x4x4"])
def test_a_choice_that_cannot_be_read_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*CALL, "--selected", wrong])
    assert "it needs COUNTxSIZE, such as 16x128" in capsys.readouterr().err
