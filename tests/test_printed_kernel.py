# SPDX-License-Identifier: Apache-2.0
"""The kernel that docs/writing-a-backend.md prints is certified as printed."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "writing-a-backend.md"
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
REGISTERS = """
import contextlib
until_the_end = contextlib.ExitStack()
until_the_end.enter_context(registered(acme, kernel))
"""


def test_the_printed_kernel_gets_the_certificate_of_the_core_tier(tmp_path: Path):
    kernel, *_ = CODE.findall(PAGE.read_text())
    (tmp_path / "printed_kernel.py").write_text(kernel + REGISTERS)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "ringattn_conformance.cli", "run", "acme", "--tier", "core"]
    done = subprocess.run(
        [*command, "--", "-p", "printed_kernel"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "CERTIFIED for the core tier\n" in done.stdout
