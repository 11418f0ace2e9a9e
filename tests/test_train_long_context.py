# SPDX-License-Identifier: Apache-2.0
"""Whether the example of long contexts trains as one device does, and resumes from a checkpoint on two processes."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_long_context.py"
SMALL = ("--length", "256", "--layers", "2", "--width", "64", "--hidden", "128", "--head-size", "16")
EVERY_STEP = ("--steps", "4", "--save-every", "2", "--print-every", "1")
# Seconds that a test waits for a process; it is then killed.
PATIENCE = 200
# Compiling takes most of the time of these tests; sessions of nox pass more flags against it.
UNOPTIMISED = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
STEP = re.compile(r"^step (\d+)/4  loss ([\d.]+)  [\d,]+ tokens/s$", re.MULTILINE)


def started(*arguments: str) -> subprocess.Popen:
    environment = {"XLA_FLAGS": UNOPTIMISED} | os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def outputs(*processes: subprocess.Popen, status: int = 0) -> list[str]:
    """What each process printed. All have to end, and with this status."""
    try:
        found = [process.communicate(timeout=PATIENCE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode == status for process in processes), found
    return found


def losses(output: str) -> dict[int, float]:
    return {int(step): float(loss) for step, loss in STEP.findall(output)}


def test_it_trains_as_one_device_does_and_two_processes_resume_it(tmp_path: Path):
    training = (str(EXAMPLE), *SMALL, *EVERY_STEP, "--checkpoints", str(tmp_path / "run"))
    (output,) = outputs(started(*training, "--cpu", "8", "--check"))
    unbroken = losses(output)
    assert list(unbroken) == [1, 2, 3, 4]
    assert "Every loss equals that of one device" in output.splitlines()[-1]

    shutil.rmtree(tmp_path / "run" / "4")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    join = [("--cpu", "4", "--heartbeat", "60", "--distributed", f"{coordinator},2,{n}") for n in range(2)]
    first, second = outputs(*(started(*training, *options) for options in join))
    resumed = losses(first)
    assert "resumed after step 2" in first and list(resumed) == [3, 4]
    assert not losses(second), "only process 0 prints"
    assert all(abs(loss - unbroken[step]) < 1e-5 for step, loss in resumed.items()), (unbroken, resumed)


def test_losses_that_differ_from_one_device_end_with_status_1():
    code = "\n".join(
        [
            "import sys, train_long_context as example",
            "sys.argv[1:] = ['--cpu', '8', '--check']",
            "example.train = lambda a, mesh, checkpoints, say: {1: 4.0 + mesh.size / 100}",
            "example.main()",
        ]
    )
    folder = f"import sys; sys.path.insert(0, {str(EXAMPLE.parent)!r})\n"
    (output,) = outputs(started("-c", folder + code), status=1)
    assert "The losses differ from those of one device by 7.0e-02, more than 0.0001." in output
