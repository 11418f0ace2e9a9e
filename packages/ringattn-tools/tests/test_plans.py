# SPDX-License-Identifier: Apache-2.0
"""Promises of the plans in `ringattn explain`: nothing is guessed, rows add up, and faster devices cost no time."""

import dataclasses
import json
import math
from typing import Any

import pytest
from ringattn_core.backends import discovery
from ringattn_core.config import BwdParams, FwdParams, RingAttentionConfig
from ringattn_core.tuning.problem import Problem, machine
from ringattn_tools import analysis, cost, devices, tuned_files
from ringattn_tools.abstract_call import AbstractCall
from ringattn_tools.devices import MEASURED, Device, Link
from ringattn_tools.main import main, parsed
from ringattn_tools.memory import TOGETHER
from ringattn_tools.work import Work

CALL = "explain --query 1,16384,16,64 --kv 16384,8 --ring 8 --causal --layout zigzag"
GIVEN = "--rate 500,400 --link 100@10"
DEVICE = Device("fast", (5e14, 4e14), Link("near", 1e11, 1e-5), Link("far", 2e10, 1e-4), 8, "made up", 1e-5, 2e12)


def said(capsys: pytest.CaptureFixture[str], words: str) -> tuple[int, str, str]:
    status = main(f"{CALL} {words}".split())
    return status, *capsys.readouterr()


def told(capsys: pytest.CaptureFixture[str], words: str) -> dict[str, Any]:
    return json.loads(said(capsys, f"--json {words}")[1])


class TestNothingIsGuessed:
    def test_a_device_that_was_measured_needs_not_be_here(self, capsys) -> None:
        found = told(capsys, "--device h200")
        assert found["platform"] == "cuda" and found["device"]["rates"] == list(MEASURED["h200"].rates[64])
        assert (devices.measured_name("NVIDIA H200"), devices.measured_name("NVIDIA H100 80GB HBM3")) == ("h200", None)

    @pytest.mark.parametrize(
        ("words", "line"),
        [
            ("--device h200 --platform tpu", "h200 is a device of cuda"),
            ("--inner 3", "--inner: got 3"),
            ("--rate 500,400", "--link: is needed"),
            ("--link 100", "--rate: is needed"),
        ],
    )
    def test_a_mistake_is_one_line(self, capsys, words: str, line: str) -> None:
        status, out, err = said(capsys, words)
        assert status == 2 and not out and line in err and err.count("\n") == 1


class TestWhatTuningMeasuredHere:
    CHOSEN = RingAttentionConfig(FwdParams(q_blocksize=64), BwdParams(q_blocksize=32))

    @pytest.fixture(autouse=True)
    def _empty_cache(self, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RINGATTN_CACHE_DIR", str(tmp_path))

    def tuned(self, seconds: tuple[float, float] = (1e-3, 4e-3), **changes: Any) -> None:
        """Stores what tuning of a causal call on one device would."""
        given: dict[str, Any] = {
            "backend": "xla", "batch": 2, "q_length": 4096, "kv_length": 4096, "heads": 8, "kv_heads": 2,
            "head_dim": 64, "value_dim": 64, "dtype": "bfloat16", "platform": "cpu", "device": machine("cpu"),
            "versions": (), "causal": True, "options": (("layout", "contiguous"),),
        }  # fmt: skip
        trials = [
            {"part": "forward", "params": FwdParams(q_blocksize=16).to_dict(), "seconds": 1e-9},
            {"part": "forward", "params": self.CHOSEN.fwd_params.to_dict(), "seconds": seconds[0]},
            {"part": "backward", "params": self.CHOSEN.bwd_params.to_dict(), "seconds": seconds[1]},
        ]
        assert tuned_files.write(Problem(**{**given, **changes}), self.CHOSEN, trials) is not None
        discovery.clear()

    def test_is_the_rate_of_the_chosen_parameters(self, capsys) -> None:
        self.tuned()
        self.tuned((2e-3, 2e-3))
        forward, backward = told(capsys, "--link 100")["device"]["rates"]
        pairs = 2 * 8 * 4096 * 4097 / 2
        assert forward == pytest.approx(pairs * 4 * 64 / 1e-3) or forward == pytest.approx(pairs * 4 * 64 / 2e-3)
        assert backward / forward == pytest.approx(10 / 4 / 4) or backward / forward == pytest.approx(10 / 4)
        assert "tuning measured on this machine" in " ".join(said(capsys, "--link 100")[1].split())

    @pytest.mark.parametrize(
        "changes",
        [
            {"backend": "other"}, {"head_dim": 128}, {"device": "another"}, {"options": (("bias", True),)},
        ],
        ids=str,
    )  # fmt: skip
    def test_counts_only_for_kernels_like_those_of_the_call(self, changes: dict[str, Any], capsys) -> None:
        self.tuned(**changes)
        assert said(capsys, "--link 100")[0] == 2
        assert said(capsys, "--platform tpu --link 100")[0] == 2

    def test_is_not_read_with_the_policy_off(self, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
        self.tuned()
        assert said(capsys, "--link 100")[0] == 0
        monkeypatch.setenv("RINGATTN_AUTOTUNE", "off")
        assert said(capsys, "--link 100")[0] == 2


class TestTheTables:
    def test_the_marked_plan_is_that_of_the_call(self, capsys) -> None:
        for strategy, taken in (("ring", "ring"), ("all_gather", "all_gather"), ("ulysses", "ulysses of 8")):
            found = told(capsys, f"{GIVEN} --strategy {strategy}")
            assert [row["plan"] for row in found["plans"] if row["chosen"]] == [taken]
            assert found["strategy"] == strategy

    @pytest.mark.parametrize(
        ("words", "taken"), [("", "ulysses of 8"), ("--window 3000,0", "ring"), ("--kv 16384,4", "ring")]
    )
    def test_auto_is_what_the_rule_of_core_says(self, words: str, taken: str, capsys) -> None:
        (auto,) = [row for row in told(capsys, f"{GIVEN} --strategy auto {words}")["plans"] if row["chosen"]]
        assert auto["plan"] == taken

    def test_a_strategy_that_the_call_cannot_use_has_a_reason_and_no_time(self, capsys) -> None:
        (row,) = [x for x in told(capsys, f"{GIVEN} --query 1,16384,12,64 --kv 16384,4")["plans"] if x["refused"]]
        assert row["plan"] == "ulysses of 8" and row["forward"] is None
        assert row["refused"] == "12 query heads do not divide by 8 ranks"


CALLS = {
    "causal": "--query 1,16384,16,64 --kv 16384,4 --ring 4 --causal",
    "window": "--query 2,16384,16,64 --ring 8 --causal --window 3000,0",
    "documents, float32": "--query 1,16384,8,64 --ring 4 --documents 9000,3000 --dtype f32",
    "two levels": "--query 1,16384,16,64 --kv 16384,4 --ring 8 --inner 2 --causal --layout zigzag",
}


@pytest.mark.parametrize("name", CALLS)
def test_bytes_and_memory_are_those_of_the_analysis(name: str) -> None:
    found = analysis.analyse(AbstractCall.of(parsed(f"explain {CALLS[name]}".split())), "cpu", "xla")
    ring = cost.ring(found.work, DEVICE)
    for phase in ("forward", "backward"):
        listed = sum(row["times"] * row["bytes"] for row in found.sent if row["pass"] == phase)
        assert sum(step.sent for step in getattr(ring, phase)) == listed
    held = {(row["pass"], row["arrays"]): row["bytes"] for row in found.memory}
    call = sum(count for (phase, _), count in held.items() if phase == "call")
    assert ring.memory == call + max(held["forward", TOGETHER], held["backward", TOGETHER])
    assert (found.work.of_hops == found.tiles * math.prod(found.tile)).all()


def work(ranks: int = 4, length: int = 4096, heads: int = 16, kv_heads: int = 16, inner: int | None = None) -> Work:
    """A call without masks; on two levels if `inner` is given."""
    words = f"--query 1,{ranks * length},{heads},128 --kv {ranks * length},{kv_heads} --ring {ranks}"
    words = f"explain {words} --tile {length},{length}" + (f" --inner {inner}" if inner else "")
    return analysis.analyse(AbstractCall.of(parsed(words.split())), "cpu", "xla", (length, length)).work


@pytest.mark.parametrize("ranks", [1, 4, 16])
def test_faster_links_and_kernels_and_fewer_tokens_never_cost_time(ranks: int) -> None:
    def seconds(device: Device, length: int = 1024) -> list[float]:
        return [plan.seconds for plan in cost.of_strategies(work(ranks, length), device, ranks, {})]

    def faster(link: Link) -> Link:
        return dataclasses.replace(link, bandwidth=2 * link.bandwidth, latency=link.latency / 2)

    base = seconds(DEVICE)
    better = {
        "links": dataclasses.replace(DEVICE, near=faster(DEVICE.near), far=faster(DEVICE.far)),
        "launch": dataclasses.replace(DEVICE, launch=0.0),
        "rate": dataclasses.replace(DEVICE, rates=(1e16, 1e16)),
    }
    for name, device in better.items():
        assert all(a <= b for a, b in zip(seconds(device), base, strict=True)), name
        if name == "rate" or ranks > 1:
            assert seconds(device)[-1] < base[-1], name
    assert all(a < b for a, b in zip(seconds(DEVICE, 512), base, strict=True))


def test_two_levels_hide_behind_a_round_what_a_flat_ring_waits_for_at_every_hop() -> None:
    slow = dataclasses.replace(DEVICE, far=Link("slow", 3e9, 1e-3), host=4)
    flat, levels = (cost.ring(work(16, inner=inner), slow) for inner in (None, 4))
    between = [step for step in levels.forward if step.name == "between groups"]
    assert len(between) == 3 and all(step.beside > 0 for step in between)
    assert levels.waits < flat.waits


class TestLayers:
    LAYERS = "--layout contiguous --layers 5*window=1023,global"

    def test_the_table_has_what_explain_says_of_each_layer_with_its_fastest_strategy(self, capsys) -> None:
        found = told(capsys, f"--device h200 {self.LAYERS}")
        rows = [row for row in found["layers"] if row["layout"] == "striped"]
        for row, times, words in zip(rows, (5, 1), ("--window 1023,0", ""), strict=False):
            alone = told(capsys, f"--device h200 --layout striped {words}")
            best = min(alone["plans"], key=lambda plan: plan["forward"] + plan["backward"])
            assert row["strategy"] == best["plan"]
            assert row["both passes"] == pytest.approx(times * (best["forward"] + best["backward"]))
            assert (row["waits"], row["sent"]) == (pytest.approx(times * best["waits"]), times * best["sent"])
            assert row["tiles of a ring"] == times * alone["tiles_of_slowest"]
        for name in ("both passes", "waits", "sent"):
            assert rows[2][name] == pytest.approx(rows[0][name] + rows[1][name])
        sums = {row["layout"]: row["both passes"] for row in found["layers"] if row["layers"] == "sum"}
        assert found["layout"] == min(sums, key=lambda layout: sums[layout]) == "contiguous"
        assert {row["layout"] for row in found["layers"] if row["chosen"]} == {"contiguous"}
        assert "the model is fastest in 'contiguous' order" in said(capsys, f"--device h200 {self.LAYERS}")[1]

    def test_without_rates_it_compares_tiles_of_a_ring(self, capsys) -> None:
        found = told(capsys, self.LAYERS)
        assert all(row["both passes"] is None for row in found["layers"])
        sums = {row["layout"]: row["tiles of a ring"] for row in found["layers"] if row["layers"] == "sum"}
        assert found["layout"] == min(sums, key=lambda layout: sums[layout])
        for device, remedy in (("", "pass --device, or --rate"), ("--device h200 --ring 16", "pass --rate and")):
            assert remedy in " ".join(said(capsys, f"{self.LAYERS} {device}")[1].split())

    def test_what_cannot_be_is_refused(self, capsys) -> None:
        status, _, err = said(capsys, f"--window 3,0 {self.LAYERS}")
        assert status == 2 and "--layers: is given with sliding_window" in err
        for words in ("--strategy ring", "--layout striped", "--full", "--compile", "--svg x.svg"):
            status, out, err = said(capsys, f"{self.LAYERS} {words}")
            assert status == 2 and not out and f"--layers: is given with {words.split()[0]}. Leave" in err
        for layers in ("5*local", "0*global"):
            with pytest.raises(SystemExit):
                main(f"{CALL} --layers {layers}".split())
            assert f"got '{layers}', it needs" in capsys.readouterr().err
