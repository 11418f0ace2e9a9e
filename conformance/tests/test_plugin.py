# SPDX-License-Identifier: Apache-2.0
"""The plugin: light, in time, polite to other tests, and clear about what it ran."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ringattn_conformance.devices import COUNT_FLAG

CONFTEST = """
import contextlib
import jax
from ringattn_core import Backend, Feature
from ringattn_core.backends.discovery import registered

backend = Backend("own", 1, ("cpu",), frozenset(Feature), kernel="nowhere:KERNEL")
until_the_end = contextlib.ExitStack()
until_the_end.enter_context(registered(backend))
missing = Backend("missing", 1, ("cpu",), (), kernel="nowhere:KERNEL", probe="os:getcwd")
until_the_end.enter_context(registered(missing))
float32 = {Feature.FLOAT32}
elsewhere = Backend("elsewhere", 1, ("CPU",), float32, kernel="nowhere:KERNEL")
until_the_end.enter_context(registered(elsewhere))
dtypeless = Backend("dtypeless", 1, ("cpu",), {Feature.CAUSAL}, kernel="nowhere:KERNEL")
until_the_end.enter_context(registered(dtypeless))
"""
COUNTS = """
def test_devices(ringattn_backend):
    import jax
    print("DEVICES", len(jax.devices()))
"""
FAILS = """
def test_that_fails(ringattn_backend):
    assert ringattn_backend == "other"
"""
UNRELATED = """
import os
def test_flags():
    print("FLAGS", os.environ.get("XLA_FLAGS"))
"""


def _pytest(folder: Path, test: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A pytest of its own, whose conftest.py imports JAX as early as it can; no project around it has a say."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(test)
    kept = {name: x for name, x in os.environ.items() if not name.startswith(("PYTEST_", "XLA_FLAGS"))}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-s",
        "-p",
        "no:cacheprovider",
        "test_it.py",
        *arguments,
    ]
    return subprocess.run(command, env=kept | variables, cwd=folder, capture_output=True, text=True)


def test_importing_it_imports_no_jax():
    code = "import sys, ringattn_conformance.plugin; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_the_cpu_is_eight_devices_even_if_a_conftest_imports_jax(tmp_path: Path):
    assert "DEVICES 8" in _pytest(tmp_path, COUNTS, "--ringattn-backend", "own").stdout


def test_a_number_of_devices_that_the_user_chose_stays(tmp_path: Path):
    done = _pytest(tmp_path, COUNTS, "--ringattn-backend", "own", XLA_FLAGS=f"{COUNT_FLAG}=3")
    assert "DEVICES 3" in done.stdout


def test_other_flags_of_the_user_stay(tmp_path: Path):
    done = _pytest(tmp_path, UNRELATED, "--ringattn-backend", "own", XLA_FLAGS="--xla_cpu_enable_fast_math=false")
    assert f"FLAGS --xla_cpu_enable_fast_math=false {COUNT_FLAG}=8" in done.stdout


def test_runs_that_have_nothing_to_do_with_the_suite_are_left_alone(tmp_path: Path):
    done = _pytest(tmp_path, UNRELATED)
    assert "FLAGS None" in done.stdout
    assert "ringattn:" not in done.stdout


def test_the_header_names_versions_backends_and_variables(tmp_path: Path):
    done = _pytest(tmp_path, COUNTS, "--ringattn-backend", "own", RINGATTN_BACKEND="own", RINGATTN_TYPO="1")
    assert "ringattn: python" in done.stdout
    for name in ("jaxlib", "numpy", "pytest", "pytest-xdist", "ringattn-core", "ringattn-xla", "ringattn-conformance"):
        assert f", {name} " in done.stdout
    assert "ringattn backend: own of this process 0 on 8 cpu devices" in done.stdout
    assert "RINGATTN_BACKEND=own" in done.stdout
    assert "RINGATTN_TYPO=1" in done.stdout


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("owm", "did you mean 'own'"),
        ("missing", "--ringattn-backend missing: /"),
        ("elsewhere", "its descriptor names the platform 'CPU'. JAX has cpu, cuda"),
        ("dtypeless", "its descriptor declares no dtype. Declare at least one of FLOAT32"),
    ],
)
def test_a_backend_that_cannot_be_certified_stops_the_run(tmp_path: Path, name: str, message: str):
    done = _pytest(tmp_path, COUNTS, "--ringattn-backend", name)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr


def test_a_failure_ends_with_the_line_that_runs_it_alone(tmp_path: Path):
    done = _pytest(tmp_path, FAILS, "--ringattn-backend", "own")
    assert "pytest --pyargs 'test_it::test_that_fails[own]' --ringattn-backend own" in done.stdout


def test_a_backend_named_twice_is_certified_once(tmp_path: Path):
    done = _pytest(tmp_path, FAILS, "--ringattn-backend", "own", "--ringattn-backend", "own")
    assert "1 failed" in done.stdout


def test_a_test_file_of_somebody_else_is_one_import(tmp_path: Path):
    modules = ("test_block", "test_ring", "test_mixtures")
    imports = "\n".join(f"from ringattn_conformance.suite.{module} import *" for module in modules)
    options = ("--ringattn-backend", "xla", "--ringattn-largest-ring", "2", "-k", "gqa and all_gather")
    done = _pytest(tmp_path, imports, *options, JAX_PLATFORMS="cpu")
    assert "1 passed" in done.stdout, done.stdout
