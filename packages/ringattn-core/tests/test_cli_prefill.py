# SPDX-License-Identifier: Apache-2.0
"""Promises of `ringattn explain --query-offset`: it says what `prefill_attention` would send, and how many bytes."""

import json
from typing import Any

import pytest
from ringattn_core.cli.main import main

CHUNK = "explain --query 2,{tokens},4,16 --kv 64,2,8 --ring 4 --dtype bf16 --causal --query-offset 16"


def told(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    assert main(f"{words} --backend xla --json".split()) == 0
    return json.loads(capsys.readouterr()[0])


@pytest.mark.parametrize(("tokens", "chosen"), [(8, "queries"), (32, "keys")])
def test_it_sends_what_is_fewer_bytes(capsys: pytest.CaptureFixture[str], tokens: int, chosen: str) -> None:
    rows = told(capsys, CHUNK.format(tokens=tokens))["prefill"]
    assert [row["send"] for row in rows if row["chosen"]] == [chosen]
    # Three other ranks; a token of the cache has 2 heads of 16 and 8, and one of the chunk 4 heads.
    assert {row["send"]: row["sent"] for row in rows} == {
        "keys": 3 * 2 * 16 * 2 * (16 + 8) * 2,
        "queries": 3 * 2 * tokens // 4 * 4 * (16 * 2 + 8 * 4 + 12),
    }


def test_the_keys_are_those_that_the_ring_sends(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, CHUNK.format(tokens=8))
    (forward,) = (row for row in found["sent"] if row["pass"] == "forward")
    assert [row["sent"] for row in found["prefill"] if row["send"] == "keys"] == [forward["times"] * forward["bytes"]]


@pytest.mark.parametrize(
    "words",
    [
        "explain --query 2,8,4,16 --kv 64,2 --ring 4 --causal",
        "explain --query 2,8,4,16 --kv 64,2 --ring 4 --query-offset 16",
        "explain --query 2,8,4,16 --kv 64,2 --ring 1 --causal --query-offset 16",
        f"{CHUNK.format(tokens=8)} --bias 1,1,1,64",
        f"{CHUNK.format(tokens=8)} --dropout 0.1",
    ],
)
def test_calls_that_it_cannot_make_are_not_mentioned(capsys: pytest.CaptureFixture[str], words: str) -> None:
    assert "prefill" not in told(capsys, words)


def test_the_text_names_what_travels(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(CHUNK.format(tokens=8).split()) == 0
    text = capsys.readouterr()[0]
    assert "causal, query offset 16; each rank holds 2 queries and 16 keys" in text
    assert "By default it sends the queries, which is fewer bytes." in text
