# SPDX-License-Identifier: Apache-2.0
"""Promises of the plans in `ringattn explain`: devices that are not here, rows that add up, JSON that is complete."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from ringattn_core.backends import discovery
from ringattn_core.cli.abstract_call import AbstractCall
from ringattn_core.cli.main import main, parsed
from ringattn_core.cli.output import Seconds
from ringattn_core.cli.shards import trace
from ringattn_core.strategies import choose

CALL = "explain --query 1,16384,8,64 --ring 8 --causal --layout zigzag"


def said(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, str, str]:
    status = main(f"{CALL} {words}".split())
    return status, *capsys.readouterr()


def told(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    return json.loads(said(capsys, f"--json {words}")[1])


def test_a_device_needs_not_be_here(capsys: pytest.CaptureFixture[str]) -> None:
    found = told(capsys, "--device h200")
    assert found["platform"] == "cuda" and found["device"]["name"] == "h200"
    assert found["device"]["near"]["name"] == "nvlink"
    assert told(capsys, "--platform tpu")["device"]["name"] == "v5p"
    assert told(capsys, "--device h200 --link network")["device"]["near"]["name"] == "network"


def test_of_devices_without_constants_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert "no constants for these rocm devices" in said(capsys, "--platform rocm")[1]
    assert "plans" not in told(capsys, "--platform rocm")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--device h200 --platform tpu", "h200 is a device of cuda, and --platform is tpu"),
        ("--inner 3", "--inner: got 3. Pass a divisor of the ring of 8"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], words: str, line: str) -> None:
    status, out, err = said(capsys, words)
    assert status == 2 and not out and line in err and err.count("\n") == 1


def test_the_marked_plan_is_that_of_the_call_and_auto_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    for strategy in ("ring", "all_gather", "ulysses"):
        found = told(capsys, f"--device h200 --strategy {strategy}")
        assert [row["plan"].split()[0] for row in found["plans"] if row["chosen"]] == [strategy]
    fastest = min(found["plans"], key=lambda row: row["forward"] + row["backward"])
    assert found["auto"] == fastest["plan"]
    assert found["auto_forward"] == min(found["plans"], key=lambda row: row["forward"])["plan"]
    (auto,) = [row for row in told(capsys, "--device h200 --strategy auto")["plans"] if row["chosen"]]
    assert auto["plan"] == fastest["plan"]
    assert found["auto"] == told(capsys, "--device h200 --bias 1,1,1,16384")["auto_forward"], "a bias makes both one"


def test_the_tables_of_a_ring_say_so_where_the_call_asks_for_another_strategy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sentence = "The tables of hops, sends and memory are those of strategy='ring'"
    for strategy in ("all_gather", "ulysses", "auto"):
        assert sentence in said(capsys, f"--strategy {strategy}")[1]
    assert sentence not in said(capsys, "")[1] and sentence not in said(capsys, "--strategy ring")[1]


def test_a_sentence_names_both_plans_of_auto(capsys: pytest.CaptureFixture[str]) -> None:
    call = "explain --query 1,32768,16,128 --ring 2 --causal --layout zigzag --device h100"
    for words, sentence in {
        "--strategy auto": "takes ulysses of 2 with gradients, and ring for a forward pass alone. ",
        "--strategy ring": "for a forward pass alone. Both passes take",
        "--bias 1,1,1,32768": "strategy='auto' takes ulysses of 2. Both passes take",
    }.items():
        main(f"{call} {words}".split())
        assert sentence in " ".join(capsys.readouterr().out.split())


def test_auto_is_what_a_traced_call_takes_which_does_not_know_its_documents(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = "--query 1,16384,16,128 --ring 2 --causal --layout zigzag --device h200 --strategy auto --documents"
    words = f"explain {words} {','.join(['256'] * 64)}"
    main(f"{words} --json".split())
    found = json.loads(capsys.readouterr().out)
    assert found["auto"] == "ring"
    assert min(found["plans"], key=lambda row: row["forward"] + row["backward"])["plan"] == "ulysses of 2"
    monkeypatch.setattr(choose, "device_of", lambda *_: SimpleNamespace(device_kind="NVIDIA H200"))
    taken = []
    trace(AbstractCall.of(parsed(words.split())), lambda call: taken.append(choose.settled(discovery.get("xla"), call)))
    assert {differentiated for _, differentiated in taken} == {"ring"}
    main(words.split())
    found = " ".join(capsys.readouterr().out.split())
    assert "By the table above, which counts documents and whole tiles, ulysses of 2 is faster." in found


def test_a_plan_may_be_faster_only_because_whole_tiles_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    words = "explain --query 1,8192,16,128 --ring 2 --layout zigzag --window 300,300 --device h100"
    main(words.split())
    assert "documents and whole tiles, ring is faster." in " ".join(capsys.readouterr().out.split())


def test_a_row_of_several_hops_stands_for_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ("", "--inner 4"):
        found = told(capsys, f"--device h200 {words}")
        for plan in found["plans"]:
            rows = [row for row in found["steps"] if row["plan"] == plan["plan"]]
            assert sum((row["sent"] or 0) * row["times"] for row in rows) == plan["sent"], plan["plan"]


def test_durations_have_a_unit() -> None:
    assert [str(Seconds(x)) for x in (2.0, 0.0123, 4.5e-6, 0.0)] == ["2 s", "12.3 ms", "4.5 us", "0 us"]
    assert json.dumps(Seconds(0.5)) == "0.5"
