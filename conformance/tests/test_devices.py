# SPDX-License-Identifier: Apache-2.0
"""Workers see all devices, each starts at a different one, and nothing that the user has set is changed."""

import os
from pathlib import Path

import jax
import pytest
from ringattn_conformance import plugin, ranks
from ringattn_conformance.ranks import Placement
from small_suites import started

SUITE = "from ringattn_conformance.suite.conftest import *"
TEST = """
import os
from pathlib import Path

import jax.numpy as jnp
import pytest
from ringattn_conformance import ranks

@pytest.mark.parametrize("number", range(8))
def test_where_a_call_runs(ringattn_backend, number):
    (device,) = jnp.zeros(1).devices()
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    seen = [one.id for one in ranks.own_first()]
    Path(worker).write_text(f"{device.id} {seen} {os.environ['XLA_PYTHON_CLIENT_PREALLOCATE']}")
"""


@pytest.mark.parametrize(
    ("worker", "order"), [(None, "abc"), ("gw0", "abc"), ("gw1", "bca"), ("gw2", "cab"), ("gw13", "bca")]
)
def test_a_worker_begins_with_its_own_device_and_sees_the_others(
    monkeypatch: pytest.MonkeyPatch, worker: str | None, order: str
):
    monkeypatch.setattr(jax, "devices", lambda: list("abc"))
    monkeypatch.delenv(ranks.WORKER, raising=False)
    if worker is not None:
        monkeypatch.setenv(ranks.WORKER, worker)
    assert "".join(ranks.own_first()) == order


def test_rings_are_as_real_in_a_worker_as_without(monkeypatch: pytest.MonkeyPatch):
    count = len(jax.devices())
    monkeypatch.setenv(ranks.WORKER, "gw1")
    placement = Placement(count).here()
    assert not placement.emulated
    assert [one.id for one in placement.mesh.devices.flat] == [*range(1, count), 0][:count]


def test_calls_run_on_the_own_device_and_processes_share_memory(tmp_path: Path):
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "conftest.py").write_text(SUITE)
    (tmp_path / "test_it.py").write_text(TEST)
    line = ("-m", "pytest", "-p", "no:cacheprovider", "test_it.py", "-n", "2", "--ringattn-backend", "xla")
    before = os.environ.get(plugin.PREALLOCATE)
    assert before in (None, "false"), "this test starts processes that inherit it"
    done = started(tmp_path, *line)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "gw0").read_text() == f"0 {[*range(8)]} false"
    assert (tmp_path / "gw1").read_text() == f"1 {[1, 2, 3, 4, 5, 6, 7, 0]} false"
