# SPDX-License-Identifier: Apache-2.0
"""Rings over several processes: bitwise what one process computes, and no process outlives another for long."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
from ringattn_testing import ring_process

# Seconds that a test waits for a child; it then kills all of them.
PATIENCE = 200
HEARTBEAT = 6


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@contextmanager
def started(job: str, last: list[str], tmp_path: Path) -> Iterator[list[subprocess.Popen]]:
    """Starts a process for each entry of `last`, its last argument. Kills them in the end."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment = os.environ | {"XLA_FLAGS": " ".join(flags)}
    port, count, children = free_port(), str(len(last)), []
    try:
        for process, argument in enumerate(last):
            command = [sys.executable, "-m", ring_process.__name__, job, port, count, str(process), argument]
            with log_of(process, tmp_path).open("w") as log:
                children.append(subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=tmp_path))
        yield children
    finally:
        for child in children:
            child.kill()
        for child in children:
            child.wait()


def log_of(process: int, tmp_path: Path) -> Path:
    return tmp_path / f"process-{process}.log"


def test_several_processes_compute_bitwise_what_one_does(tmp_path: Path) -> None:
    processes = 2
    files = [str(tmp_path / f"{process}.npz") for process in range(processes)]
    with started("compute", files, tmp_path) as children:
        devices = jax.devices()[: processes * ring_process.DEVICES_EACH]
        wanted = ring_process.shards(ring_process.computed(devices))
        for process, child in enumerate(children):
            assert child.wait(PATIENCE) == 0, log_of(process, tmp_path).read_text()
    found = [dict(np.load(file)) for file in files]
    assert all(each.keys() < wanted.keys() for each in found), "a process has shards of all devices"
    assert set().union(*found) == wanted.keys()
    for name, x in ((name, x) for each in found for name, x in each.items()):
        np.testing.assert_array_equal(x, wanted[name], err_msg=name)
        assert x.any(), name
    for name in (name for name in wanted if name.startswith("moved")):
        np.testing.assert_array_equal(wanted[name], wanted[name.replace("moved", "placed")], err_msg=name)


def test_a_killed_process_ends_the_others_within_the_timeout_of_heartbeats(tmp_path: Path) -> None:
    with started("wait", [str(HEARTBEAT)] * 2, tmp_path) as children:
        start = time.monotonic()
        while not all("ready" in log_of(process, tmp_path).read_text() for process in range(2)):
            assert time.monotonic() - start < PATIENCE and all(child.poll() is None for child in children)
            time.sleep(0.1)
        children[1].kill()
        start = time.monotonic()
        children[0].wait(PATIENCE)
        # Heartbeats are sent at half of the timeout, and this machine may be busy.
        assert children[0].wait(PATIENCE) == -signal.SIGABRT and time.monotonic() - start < 2 * HEARTBEAT + 5
        assert "another task died" in log_of(0, tmp_path).read_text()
