# SPDX-License-Identifier: Apache-2.0
"""Whether the scripts that time kernels beside rivals have the rows, columns and timings that they promise."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(BENCHMARKS)


def test_a_burst_comes_after_a_rest_and_has_a_few_calls():
    import interleaved

    done: list[str] = []
    runs = {name: lambda name=name: done.append(name) for name in "ab"}
    found = interleaved.bursts(runs, rounds=2, rest=lambda seconds: done.append("rest"))
    assert set(found) == {"a", "b"}
    bursts = "".join("-" if x == "rest" else x for x in done).split("-")
    before, *measured = bursts
    assert {"a", "b"} == set(before)
    assert [sorted("".join(dict.fromkeys(x)) for x in measured[at : at + 2]) for at in (0, 2)] == [["a", "b"]] * 2
    assert min(map(len, measured)) >= interleaved.FEWEST


def test_every_round_has_an_order_of_its_own_which_repeats_from_run_to_run():
    import interleaved

    orders = [interleaved.round_order("abcd", number) for number in range(6)]
    assert orders[0] == list("abcd")
    assert all(sorted(order) == list("abcd") for order in orders)
    assert len({tuple(order) for order in orders}) > 3
    assert orders == [interleaved.round_order("abcd", number) for number in range(6)]


def test_a_row_has_the_time_of_the_rival_over_ours_in_every_column():
    import call_rivals as table

    def times(rival: float, **mine: float) -> dict[str, Any]:
        return {timing: {table.RIVAL: rival} | mine for timing in table.TIMINGS}

    whole = {"forward": times(1.0, ours=2.0), "forward+backward": times(3.0, ours=4.0) | {}}
    for timing in table.TIMINGS:
        whole["forward+backward"][timing][table.UNORDERED] = 3.0
    assert table.row("a", whole) == "| a | 0.50 | 0.50 | 0.75 | 0.75 | 1.00 | 1.00 |"
    assert table.row("b", {"forward": whole["forward"]}) == "| b | 0.50 | 0.50 | - | - | - | - |"
    assert {line.count("|") for line in (*table.heading().splitlines(), table.row("a", whole))} == {8}


def test_everything_is_compiled_before_anything_is_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """With our backend for CPUs in all three places."""
    import call_rivals as table
    import rivals
    from workloads import Shape, Workload

    small = Workload(Shape(1, 64, 2, 2, 16, "float32"))
    cases = {"a": small, "b": Workload(small.shape, document=32, parts=("forward",))}
    steps: list[str] = []

    def timed(runs: Any, rounds: int) -> dict[str, dict[str, float]]:
        steps.append("time")
        jax.block_until_ready([run() for run in runs.values()])
        return {timing: dict.fromkeys(runs, 1.0) for timing in table.TIMINGS}

    def prepared(*given: Any) -> Any:
        steps.append("compile")
        return prepare(*given)

    prepare = table.prepare
    monkeypatch.setattr(table, "ALL", cases)
    monkeypatch.setitem(rivals.RIVALS["gpu"], table.RIVAL, rivals.RIVALS["cpu"][table.OURS])
    monkeypatch.setattr(table, "both_timings", timed)
    monkeypatch.setattr(table, "prepare", prepared)
    table.measure(list(cases), rounds=1)
    assert steps == ["compile"] * 7 + ["time"] * 3
    out = capsys.readouterr().out
    assert "| a | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 | 1.00 |\n| b | 1.00 | 1.00 | - | - | - | - |" in out
    monkeypatch.setitem(table.TOLERANCES, "float32", -1.0)
    with pytest.raises(SystemExit, match="a, forward: ours differs from FlashAttention-3 by"):
        table.measure(["a"], rounds=1)


def test_the_rival_can_take_every_case(monkeypatch: pytest.MonkeyPatch):
    import call_rivals
    import flash_attention_3
    import forward_rivals

    monkeypatch.setenv(flash_attention_3.VARIABLE, "somewhere.so")
    for case in (*call_rivals.ALL.values(), *forward_rivals.CASES.values()):
        assert call_rivals.RIVALS["gpu"][call_rivals.RIVAL].why_not(case) is None
    assert set(call_rivals.DEFAULT) <= set(call_rivals.ALL)


def test_the_backward_pass_alone_has_every_default_case_but_sinks():
    import backward_rivals
    import call_rivals

    assert set(call_rivals.DEFAULT) - set(backward_rivals.KNOWN) == {"sinks"}


@pytest.mark.parametrize("name", ["window 1024", "documents of 512"])
def test_both_families_take_every_forward_case(name: str):
    """Traced for a Hopper, not compiled."""
    import forward_rivals
    from ringattn_triton.launch import compiling_for

    for title, case in forward_rivals.CASES.items():
        if title.endswith(name):
            inputs = jax.eval_shape(case.shape.arrays)[:3]
            programs = forward_rivals.programs(case)
            with compiling_for(90):
                for family in forward_rivals.FAMILIES:
                    assert jax.eval_shape(programs[family], *inputs).shape == inputs[0].shape


def test_a_forward_row_has_the_milliseconds_of_every_column():
    import forward_rivals as table

    seconds = {timing: {"Hopper": 1e-3, "portable": 2e-3, table.RIVAL: 3e-3} for timing in table.TIMINGS}
    assert table.row("a", seconds) == "| a | 1.000 | 1.000 | 2.000 | 2.000 | 3.000 | 3.000 |"
    assert {line.count("|") for line in (*table.heading().splitlines(), table.row("a", seconds))} == {8}


def test_a_backward_row_has_each_timing_over_the_rival_where_there_is_one():
    import backward_rivals as table

    seconds = {timing: {"ordered": 2e-3, table.RIVAL: 1e-3} for timing in table.TIMINGS}
    assert table.row("ordered", seconds, 1.0).count("2.00 of FlashAttention-3") == 2
    assert "of FlashAttention-3" not in table.row("ordered", {x: {"ordered": 1.0} for x in table.TIMINGS}, 1.0)


def test_every_option_is_timed_beside_a_call_without_it(monkeypatch: pytest.MonkeyPatch):
    import gpu_attention
    from workloads import Shape

    def timed(runs: Any, rounds: int) -> dict[str, dict[str, float]]:
        jax.block_until_ready([run() for run in runs.values()])
        seconds = {name: 1.0 + number for number, name in enumerate(runs)}
        return {"sustained": seconds, "burst": dict.fromkeys(runs, 1.0)}

    monkeypatch.setattr(gpu_attention, "both_timings", timed)
    table, shape = gpu_attention.Table("xla", rounds=1), Shape(1, 32, 2, 2, 16)
    table.cost("d16", gpu_attention.options(table, shape, gpu_attention.OPTIONS), {"bias": 1.4}, shape)
    for part in gpu_attention.PARTS:
        for name, ratio in {"soft cap 30": 2.0, "bias": 3.0, "ALiBi": 4.0, "dropout 0.1": 5.0}.items():
            assert table.raw[f"d16, {name} {part}, sustained, over nothing"] == ratio
            assert table.raw[f"d16, {name} {part}, burst, over nothing"] == 1.0
    assert [claim.measured for claim in table.claims] == [3.0, 3.0]


@pytest.mark.parametrize("script", ["call_rivals.py", "forward_rivals.py", "gpu_attention.py"])
def test_without_a_gpu_a_script_says_so(script: str):
    command, environment = [sys.executable, str(BENCHMARKS / script)], os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 1 and done.stderr.startswith("this benchmark needs a") and "GPU" in done.stderr


def test_an_unknown_case_is_refused_with_the_names_of_all():
    command = [sys.executable, str(BENCHMARKS / "call_rivals.py"), "no such"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stderr == "there is no case 'no such' among these\n"
    assert "grouped short" in done.stdout and "decode" not in done.stdout
