# SPDX-License-Identifier: Apache-2.0
"""The work of packed documents is what counting each pair gives, and `pack` makes rows in which ranks share it."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from ringattn_core.errors import InputError
from ringattn_core.placement.layout import LAYOUTS, Shards
from ringattn_tools import documents
from ringattn_tools.main import main

DRAW = np.random.default_rng(0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ring", [1, 2, 3, 4, 8])
def test_pairs_are_those_that_a_mask_counts(ring: int, layout: str) -> None:
    lengths, length = [5, 17, 1, 16, 4], 48  # and 5 tokens of padding
    ids = np.append(np.repeat(np.arange(len(lengths)), lengths), [-1] * 5)
    sees = (ids[:, None] == ids) & (ids >= 0) & (np.arange(length)[:, None] >= np.arange(length))
    order = Shards(layout, ring).order(length)
    wanted = sees[np.ix_(order, order)].reshape(ring, length // ring, ring, -1).sum((1, 3))
    np.testing.assert_array_equal(documents.pairs(lengths, length, ring, layout), wanted)


def test_explain_says_how_busy_each_layout_keeps_the_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    shares = documents.busy([32768] * 4, 131072, 8)
    assert {name: round(share, 2) for name, share in shares.items()} == {
        "contiguous": 0.67,
        "zigzag": 0.57,
        "striped": 1.0,
    }
    words = ["explain", "--query", "1,1024,2,8", "--ring", "8", "--documents", "256,256,256,256", "--causal", "--json"]
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["busy"] == documents.busy([256] * 4, 1024, 8)
    assert main([*words, "--window", "3,0"]) == 0
    assert "busy" not in json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("ring", [1, 2, 3, 4, 8])
def test_rows_hold_every_document_once_and_say_what_they_reached(ring: int) -> None:
    lengths, length = DRAW.integers(20, 400, 60).tolist(), 2400
    packed = documents.pack(lengths, length, ring)
    assert packed == documents.pack(lengths, length, ring)
    assert sorted(number for row in packed.rows for number, _ in row) == list(range(60))
    assert len(packed.rows) <= 1.1 * sum(lengths) / length + 1
    for row, ids, reached in zip(packed.rows, packed.segment_ids, packed.reached, strict=True):
        found = [(int(ids[at]), int(at)) for at in np.flatnonzero(np.diff(ids, prepend=-1)) if ids[at] >= 0]
        assert [place for place in row if lengths[place[0]]] == found
        sees = (ids[:, None] == ids) & (ids >= 0) & (np.arange(length)[:, None] >= np.arange(length))
        work = sees.reshape(ring, -1).sum(1)
        assert reached == pytest.approx(work.max() / work.mean())


def test_short_documents_share_the_work_and_long_ones_cannot() -> None:
    short = documents.pack(DRAW.integers(200, 2000, 300).tolist(), 32768, 8)
    assert max(short.reached[:-1]) <= documents.EVEN, str(short)
    long = documents.pack([32768], 32768, 8)
    assert long.reached == (pytest.approx(15 / 8, rel=1e-3),)


@pytest.mark.parametrize(
    ("lengths", "said"), [([4, 99, 3], "document 1 has 99 tokens"), ([4, 0], "got .4, 0"), ([], "there are none")]
)
def test_documents_that_cannot_be_packed_are_refused(lengths: list[int], said: str) -> None:
    with pytest.raises(InputError, match=said):
        documents.pack(lengths, 64, 4)
    with pytest.raises(InputError, match=r"^length: got 66, which a ring of 4 ranks does not divide\. Pass 68"):
        documents.pack([4], 66, 4)
    with pytest.raises(InputError, match="have 65 tokens together, and a row 64"):
        documents.pairs([33, 32], 64, 4)


@pytest.mark.parametrize("count", [documents.pack, documents.busy, documents.pairs])
def test_lengths_that_are_no_integers_and_rings_without_ranks_are_refused(count: Callable[..., Any]) -> None:
    with pytest.raises(InputError, match=r"ring: got 0\. It needs an integer of at least 1"):
        count([4], 64, 0)
    with pytest.raises(InputError, match=r"lengths: has dtype float64\. It needs integers"):
        count([4.5], 64, 4)
    with pytest.raises(InputError, match=r"^lengths: got 3\. Pass the number of tokens of each document"):
        count(3, 64, 2)
    for length in ("64", 64.0, 0):
        with pytest.raises(InputError, match=f"^length: got {length!r}"):
            count([3], length, 2)
