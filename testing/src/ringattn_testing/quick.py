# SPDX-License-Identifier: Apache-2.0
"""For each promise of docs/promises.md, the fastest tests that fail when it is broken; `nox -s quick` runs them.

    python -m ringattn_testing.quick [--workers 2] [--only WORD ...] [--first]

Of the conformance suite it takes the fewest tests that catch every saboteur. The tests of core are chosen by breaking
core: `broken_lines.py` has the lines. It needs the repository as the working directory.
"""

import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import pytest


class Promise(NamedTuple):
    """What is promised, the modules of the suite that test it, and tests of the repository: functions or files."""

    says: str
    suite: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()


_CORE: Final = "packages/ringattn-core/tests/test_"
_EXPANDED: Final = _CORE + "expand.py::test_results_and_gradients_are_those_of_expanding_first"
_BALANCED: Final = _CORE + "balance.py::test_a_causal_ring_computes_what_it_computes_in_contiguous_order"
_CACHED: Final = _CORE + "tokens.py::test_a_cache_gets_the_entries_of_its_own_positions_with_their_gradients"
_JAX_NN: Final = "packages/ringattn-adapters/tests/test_adapters_jax_nn.py::"
_STRATEGIES: Final = _CORE + "strategies.py::test_the_output_and_all_gradients_are_those_of_the_oracle"
PROMISES: Final = {
    "rings": Promise(
        "Results and gradients are those of one device, on every ring, in every order of tokens, with every mask",
        ("test_ring", "test_block", "test_transforms"),
        (
            _EXPANDED + "[3-zigzag-AxisType.Auto-options1]",
            _BALANCED + "[4-AxisType.Explicit-44]",
            _CORE + "bounds.py::test_a_query_sees_the_keys_between_its_bounds",
            _CORE + "mask_builder.py::test_heads_whose_masks_are_intervals_see_by_their_own",
        ),
    ),
    "meshes": Promise(
        "They are so on every mesh, also where it splits the batch and the heads",
        tests=(
            _CORE + "meshes.py::test_results_and_gradients_are_those_of_one_device[mesh-automatic-13]",
            _CORE + "meshes.py::test_results_and_gradients_are_those_of_one_device[typed arrays-explicit-16]",
            _CORE + "shard_map_calls.py::test_tokens_that_are_the_same_on_all_ranks_are_refused",
        ),
    ),
    "strategies": Promise(
        "They are so with every strategy: the ring, Ulysses, and an all-gather of the keys",
        tests=(
            _STRATEGIES + "[masks-ring4-zigzag-all_gather-unchecked]",
            _STRATEGIES + "[scores-ring2-striped-data2-heads2-ulysses]",
        ),
    ),
    "numbers": Promise(
        "The error does not grow with the ring, a non-finite number is never hidden, and padding harms nobody",
        ("test_numerics",),
        (
            f"{_CORE}sinks.py::test_a_sink_that_is_no_number_is_not_hidden_by_the_hops_after_it"
            "_nor_where_no_key_is_seen[inf]",
            _CORE + "padding.py::test_nan_in_a_cotangent_reaches_all_that_its_row_sees[4]",
            _CORE + "contract.py::test_a_block_is_final_where_nothing_comes_before_or_after[ring of 2]",
        ),
    ),
    "bits": Promise(
        "Two runs give the same bits, and dropout the same bits on every ring",
        tests=(_CORE + "dropout.py::test_a_tile_keeps_the_same_entries_as_the_whole_block",),
    ),
    "cache": Promise(
        "A sharded cache is prefilled and decoded as one sequence",
        ("test_inference",),
        (_CACHED + "[3-zigzag-explicit]",),
    ),
    "refused": Promise(
        "What cannot run is refused by name before anything runs, and no option is left out",
        ("test_refusals",),
        (
            _CORE + "validation.py::test_operands_that_no_backend_could_use_are_refused",
            _CORE + "validation.py::test_a_traced_option_is_refused_by_name",
            _CORE + "selection.py",
            _CORE + "contract.py::test_a_result_of_another_shape_is_refused",
        ),
    ),
    "interface": Promise(
        "Public names, signatures and the backend API stay, and a broken backend is one sentence",
        ("test_protocol",),
        (
            _CORE + "signature.py::test_names_and_order_up_to_fused_backward_never_change",
            _CORE + "signature.py::test_an_option_that_is_left_out_is_off_in_the_canonical_call",
            _CORE + "discovery.py::test_a_broken_backend_is_one_sentence_and_every_other_call_goes_on",
            _CORE + "errors.py",
        ),
    ),
    "imports": Promise(
        "Importing core brings in nothing heavy, touches no device and writes nothing",
        tests=(
            f"{_CORE}import_hygiene.py"
            "::test_importing_core_brings_in_nothing_heavy_touches_no_device_and_writes_nothing",
        ),
    ),
    "memory": Promise(
        "A device holds its shard, whatever the ring, and is sent only rows that some query sees",
        tests=(
            _CORE + "ring.py::test_memory_per_device_depends_on_the_shard_and_not_on_the_ring[False]",
            _CORE + "ring.py::test_a_send_waits_for_all_kernels_of_the_hop_before_and_for_none_of_its_own",
            _CORE + "plan.py::test_of_a_window_only_the_rows_within_its_reach_travel",
            _CORE + "plan.py::test_every_row_that_some_query_sees_travels",
        ),
    ),
    "libraries": Promise(
        "The adapters have the names and the results of the functions that they replace",
        tests=(
            _JAX_NN + "test_the_names_order_and_defaults_are_those_of_jax",
            _JAX_NN + "test_value_and_gradients_are_those_of_jax[sides]",
        ),
    ),
}  # fmt: skip
SAME_BITS: Final = "test_numerics::test_a_repeated_run_gives_the_same_bits[{}-causal-bfloat16]"
"""No saboteur changes its bits from run to run."""
NOT_RUN: Final = {
    "the kernels of triton and tpu, documents, examples, the rest of core": "nox -s tests",
    "the whole suite, for each backend from its wheel": "nox -s conformance",
    "other versions of JAX": "nox -s newest_jax exhaustive",
    "style and types": "nox -s lint types",
    "what ran on GPUs, and what never ran": "docs/promises.md",
}


def of_suite() -> list[str]:
    """Tests of the suite that catch every saboteur, as few as a greedy choice finds, and `SAME_BITS`."""
    from ringattn_testing.conformance.saboteurs import SABOTEURS

    left = {name: {test.format("xla") for test in one.caught_by} for name, one in SABOTEURS.items()}
    chosen = [SAME_BITS.format("xla")]
    while left:
        most = collections.Counter(test for tests in left.values() for test in tests)
        best = max(most, key=lambda test: (most[test], test))
        chosen.append(best)
        left = {name: tests for name, tests in left.items() if best not in tests}
    return chosen


def promise_of(test: str) -> str:
    """Which promise a test keeps, by the name `module::test[parameters]`."""
    if test == SAME_BITS.format("xla"):
        return "bits"
    for name, promise in PROMISES.items():
        listed = (entry.rpartition("/")[2].replace(".py", "") for entry in promise.tests)
        if any(test.startswith(prefix) for prefix in listed):
            return name
    module = test.partition("::")[0]
    return next((name for name, promise in PROMISES.items() if module in promise.suite), "rings")


class Verdict(NamedTuple):
    test: str
    outcome: str
    seconds: float


def chosen(only: Sequence[str]) -> list[str]:
    """The promises with one of these words in their name, or all."""
    return [name for name in PROMISES if not only or any(word in name for word in only)]


def commands(only: Sequence[str], first: bool) -> list[tuple[list[str], bool]]:
    """The runs of pytest, and whether each is the suite's: its options must not reach other tests, nor theirs it."""
    asked = chosen(only)
    suite = [f"ringattn_conformance.suite.{test}" for test in of_suite() if promise_of(test) in asked]
    tests = [test for name in asked for test in PROMISES[name].tests]
    base = [sys.executable, "-m", "pytest", "-q", "-s", "--tb=short", "-p", "ringattn_testing.quick", "-p", "no:xdist"]
    base += ["-p", "no:cacheprovider", *(["-x"] if first else [])]
    runs = [([*base, "--ringattn-backend", "xla", "--pyargs", *suite], True)] if suite else []
    return runs + ([([*base, *tests], False)] if tests else [])


_LINE: Final = re.compile(r"^VERDICT (\w+) ([\d.]+) (.*)$")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """One line for each test that ran, or that failed before it could."""
    report = yield
    if report.when == "call" or report.failed or report.skipped:
        print(f"\nVERDICT {report.outcome} {call.duration:.2f} {item.path.stem}::{item.name}", flush=True)
    return report


def run(command: list[str], apart: bool, heard: Any) -> tuple[int, list[str]]:
    """Runs pytest, tells `heard` each verdict as it comes, and returns the exit code and what else was printed."""
    environment = {name: x for name, x in os.environ.items() if not name.startswith(("PYTEST_", "RINGATTN_"))}
    with tempfile.TemporaryDirectory() as empty:
        where = empty if apart else os.getcwd()
        process = subprocess.Popen(
            command, cwd=where, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        printed = []
        for line in process.stdout or ():
            if said := _LINE.match(line.rstrip()):
                heard(Verdict(said[3], said[1], float(said[2])))
            else:
                printed.append(line.rstrip())
        return process.wait(), printed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="how many processes run at once")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help=f"of: {', '.join(PROMISES)}")
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    asked = parser.parse_args(arguments)
    start, verdicts, lock = time.monotonic(), collections.defaultdict(list), threading.Lock()

    def heard(verdict: Verdict) -> None:
        with lock:
            verdicts[promise_of(verdict.test)].append(verdict)
            print(
                f"{sum(map(len, verdicts.values())):4d} tests, {time.monotonic() - start:.0f} s", end="\r", flush=True
            )

    runs = commands(asked.only, asked.first)
    with ThreadPoolExecutor(max(1, asked.workers)) as pool:
        ended = list(pool.map(lambda part: run(part[0], part[1], heard), runs))
    for code, printed in ended:
        if code:
            print("\n".join(printed[-150:]))
    print(" " * 40)
    promises, kept = chosen(asked.only), 0
    for name in promises:
        found = verdicts[name]
        wrong = [verdict.test for verdict in found if verdict.outcome != "passed"]
        said = "BROKEN" if wrong else "kept" if found else "NOT RUN"
        kept += said == "kept"
        seconds = sum(verdict.seconds for verdict in found)
        print(f"{said:8}{seconds:4.0f} s {len(found):4d} tests  {PROMISES[name].says}.")
        print("".join(f"{'':24}{test}\n" for test in wrong), end="")
    print(f"\n{kept} of {len(promises)} promises kept, in {time.monotonic() - start:.0f} s. Beside these, not run:")
    for what, command in NOT_RUN.items():
        print(f"  {what}: {command}")
    return int(any(code for code, _ in ended) or kept < len(promises))


if __name__ == "__main__":
    sys.exit(main())
