# SPDX-License-Identifier: Apache-2.0
"""The plugin: light, in time, polite to other tests, and clear about what it ran."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ringattn_conformance import plugin
from ringattn_conformance.plugin import COUNT_FLAG
from ringattn_core import Backend, Feature
from ringattn_core.backends.discovery import registered
from ringattn_testing.conformance.small_suites import started

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
"""
COUNTS = """
def test_devices(ringattn_backend):
    import os
    import jax
    print("DEVICES", len(jax.devices()), os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"], os.environ["XLA_FLAGS"])
"""
WHERE = """
import os
from pathlib import Path

import jax.numpy as jnp
import pytest
from ringattn_conformance import ranks

@pytest.mark.parametrize("number", range(8))
def test_where_a_call_runs(ringattn_backend, number):
    (device,) = jnp.zeros(1).devices()
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    seen = [one.id for one in ranks.rotated_devices()]
    Path(worker).write_text(f"{device.id} {seen} {os.environ['XLA_PYTHON_CLIENT_PREALLOCATE']}")
"""
UNRELATED = """
import os
def test_flags():
    print("FLAGS", os.environ.get("XLA_FLAGS"))
"""


def _pytest(
    folder: Path, test: str, *arguments: str, conftest: str = CONFTEST, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A pytest of its own, whose conftest.py imports JAX as early as it can; no project around it has a say."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_it.py").write_text(test)
    return started(folder, "-m", "pytest", "-s", "-p", "no:cacheprovider", "test_it.py", *arguments, **variables)


def test_importing_it_imports_no_jax():
    code = "import sys, ringattn_conformance.plugin; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a run prints that counts devices; it names its backend twice."""
    twice = ("--ringattn-backend", "own") * 2
    variables = {"RINGATTN_TYPO": "1", "XLA_FLAGS": "--xla_cpu_enable_fast_math=false"}
    return _pytest(tmp_path_factory.mktemp("said"), COUNTS, *twice, **variables).stdout


def test_the_cpu_is_eight_devices_even_if_a_conftest_imports_jax_and_other_flags_stay(said: str):
    assert f"DEVICES 8 false --xla_cpu_enable_fast_math=false {COUNT_FLAG}=8" in said


def test_a_number_of_devices_and_a_share_of_memory_that_the_user_chose_stay(tmp_path: Path):
    variables = {"XLA_FLAGS": f"{COUNT_FLAG}=3", "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    done = _pytest(tmp_path, COUNTS, "--ringattn-backend", "own", **variables)
    assert "DEVICES 3 true" in done.stdout


def test_runs_that_have_nothing_to_do_with_the_suite_are_left_alone(tmp_path: Path):
    done = _pytest(tmp_path, UNRELATED)
    assert "FLAGS None" in done.stdout
    assert "ringattn:" not in done.stdout


def test_the_header_names_versions_backends_and_variables(said: str):
    assert "ringattn: python" in said
    for name in ("jaxlib", "numpy", "pytest", "pytest-xdist", "ringattn-core", "ringattn-xla", "ringattn-conformance"):
        assert f", {name} " in said
    assert "ringattn backend: own, registered in this process\n" in said
    assert f"ringattn suite: {Path(plugin.__file__).parent}\n" in said
    assert "RINGATTN_TYPO=1" in said


def test_a_backend_that_is_not_available_stops_the_run(tmp_path: Path):
    done = _pytest(tmp_path, COUNTS, "--ringattn-backend", "missing")
    assert done.returncode != 0
    assert "--ringattn-backend missing: /" in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, None),
        ({"name": "owm"}, "did you mean 'own'"),
        ({"platforms": ("cpu", "CUDA")}, "its descriptor names the platform 'CUDA'"),
        ({"features": {Feature.CAUSAL}}, "its descriptor declares no dtype. Declare at least one of FLOAT32"),
    ],
)
def test_why_a_backend_cannot_be_certified(changes: dict[str, Any], message: str | None):
    fields = {"name": "own", "platforms": ("cpu",), "features": {Feature.FLOAT32}} | changes
    with registered(Backend(api=1, kernel="nowhere:KERNEL", **fields | {"name": "own"})):
        why = plugin.unusable(fields["name"])
    assert why is None if message is None else message in str(why)


def test_a_test_file_of_somebody_else_is_one_import(tmp_path: Path):
    modules = ("test_block", "test_ring")
    imports = "\n".join(f"from ringattn_conformance.suite.{module} import *" for module in modules)
    options = ("--ringattn-backend", "xla", "-k", "gqa and all_gather")
    done = _pytest(tmp_path, imports, *options)
    assert "1 passed" in done.stdout, done.stdout


def test_calls_run_on_the_own_device_of_a_worker_and_processes_share_memory(tmp_path: Path):
    conftest = "from ringattn_conformance.suite.conftest import *"
    done = _pytest(tmp_path, WHERE, "-n", "2", "--ringattn-backend", "xla", conftest=conftest)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "gw0").read_text() == f"0 {[*range(8)]} false"
    assert (tmp_path / "gw1").read_text() == f"1 {[1, 2, 3, 4, 5, 6, 7, 0]} false"
