# SPDX-License-Identifier: Apache-2.0
"""Whether the benchmark suite measures beside rivals that fail, and says which differences exceed the noise."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def suite(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(BENCHMARKS)
    import suite

    return suite


@pytest.fixture(scope="module")
def smoke(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The JSON of a smoke run, which has a rival that aborts, one that raises, and one that is not installed."""
    path = tmp_path_factory.mktemp("bench") / "run.json"
    command = [sys.executable, str(BENCHMARKS / "suite.py"), "--suite", "cpu", "--smoke", "--rounds", "2"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    done = subprocess.run([*command, "--json", str(path)], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| forward+backward | ours, ring of 2 |" in done.stdout
    return path


def test_rivals_that_fail_are_rows_that_say_so_and_the_others_are_measured(smoke: Path, suite: Any):
    rows = suite.read(smoke)["rows"]
    problems = {row.who: row.problem for row in rows if row.problem}
    assert problems == {
        "aborts": "it ended the process with SIGABRT",
        "raises": "ValueError: this rival always raises",
        "absent": "not installed (no module no_such_module)",
    }
    measured = {(row.workload, row.who, row.ring) for row in rows if len(row.seconds) == 2}
    on_a_ring = {("ring of 64 tokens", *one) for one in (("ours", 1), ("ours", 2), ("all-gather", 2))}
    assert measured == on_a_ring | {("decode", who, 1) for who in ("ours", "jax.nn", "flax")}


def test_every_measured_row_has_its_floor_its_memory_and_its_error(smoke: Path, suite: Any):
    for row in suite.read(smoke)["rows"]:
        if row.seconds:
            assert set(row.floor) == {"operations", "memory", *(["link"] if row.ring > 1 else [])}
            assert min(row.floor.values()) > 0 and row.temporary is not None and row.error < 5e-2


def a_run(suite: Any, seconds: dict[str, tuple[float, ...]], **machine: Any) -> dict[str, Any]:
    """A run of one length and one ring whose candidates took these seconds."""
    from measuring import Row

    floor = {"operations": 0.5, "memory": 0.25}
    figures = {"temporary": 2**20, "error": 1e-3, "rounding": 1e-3, "tera": 1.0, "floor": floor}
    rows = [
        Row(workload, "forward", who, ring, 64, seconds=taken, **figures)
        for workload, rings in (("length 64", (1,)), ("ring of 64 tokens", (1, 2)))
        for ring in rings
        for who, taken in seconds.items()
    ]
    rates = {"operations": 1e12, "memory": 1e9, "link": None, "source": "a test"}
    known = {
        "device": "a",
        "devices": 1,
        "jax": "0",
        "commit": "0",
        "python": "3",
        "date": "2000-01-01",
        "rates": rates,
    }
    return {"suite": "cpu", "smoke": True, "rounds": 5, "machine": known | machine, "rows": rows}


QUICK, SLOW = (1.0, 1.1, 1.2, 1.0, 1.1), (1.3, 1.4, 1.5, 1.3, 1.4)


@pytest.mark.parametrize(
    ("before", "after", "status", "says"),
    [
        ({"ours": QUICK}, {"ours": QUICK}, 0, "0 of 3 measurements"),
        ({"ours": QUICK}, {"ours": SLOW}, 1, "slower   1.273 x  length 64, forward: ours"),
        ({"ours": QUICK}, {"ours": (1.0, 1.3, 1.4, 1.5, 1.6)}, 0, "0 of 3 measurements"),
        ({"ours": QUICK, "flax": QUICK}, {"ours": SLOW, "flax": SLOW}, 0, "0 of 6 measurements"),
    ],
    ids=["equal", "slower", "noise", "a slow machine"],
)
def test_only_differences_beyond_the_noise_and_the_drift_of_the_machine_count(
    suite: Any, capsys: pytest.CaptureFixture[str], before: Any, after: Any, status: int, says: str
):
    assert suite.compare(a_run(suite, before), a_run(suite, after)) == status
    assert says in capsys.readouterr().out


def test_runs_of_other_devices_are_not_compared(suite: Any, capsys: pytest.CaptureFixture[str]):
    first, second = a_run(suite, {"ours": QUICK}), a_run(suite, {"ours": QUICK}, device="b")
    assert suite.compare(first, second) == 2
    assert "cannot be compared: their device is 'a' and 'b'" in capsys.readouterr().out


def test_every_script_can_be_imported():
    scripts = [path.stem for path in BENCHMARKS.glob("*.py") if '__name__ == "__main__"' in path.read_text()]
    assert len(scripts) >= 6
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(BENCHMARKS)}
    done = subprocess.run(
        [sys.executable, "-c", f"import {', '.join(scripts)}"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr


def test_pairs_are_those_that_the_mask_shows(suite: Any):
    import numpy as np
    from workloads import Shape, Workload

    shape = Shape(1, 24, 1, 1, 8)
    documents = {"documents": (9, 1, 14)}
    for options in (
        {"causal": False},
        {},
        documents,
        {"causal": False, "window": (3, 0)},
        {"window": (3, 2)} | documents,
    ):
        workload = Workload(shape, **options)
        ahead = np.arange(24)[:, None] - np.arange(24)[None]
        visible = (ahead >= 0) | (not workload.causal)
        if workload.documents:
            ids = np.repeat(np.arange(3), workload.documents)
            visible &= ids[:, None] == ids[None]
        if workload.window:
            visible &= (ahead <= workload.window[0]) & (ahead >= -workload.window[1])
        assert workload.pairs == visible.sum(), options
