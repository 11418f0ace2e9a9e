# SPDX-License-Identifier: Apache-2.0
"""The two functions that docs/writing-a-backend.md gives to `from_flash` are certified as printed.

The page's other kernels are files of the examples, which `nox -s thirdparty` certifies.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).parent.parent / "docs" / "writing-a-backend.md"
CODE = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BEFORE = """
import contextlib
import jax
import jax.numpy as jnp
from ringattn_core.backends.discovery import registered
until_the_end = contextlib.ExitStack()
"""


def test_the_printed_functions_get_the_certificate_of_the_core_tier(tmp_path: Path):
    (printed,) = [block for block in CODE.findall(PAGE.read_text()) if "def flash_backward(" in block]
    kernel, registers, _ = re.split(r"^with (registered\(.*\)):$", printed, flags=re.MULTILINE)
    (tmp_path / "printed_kernel.py").write_text(f"{BEFORE}{kernel}\nuntil_the_end.enter_context({registers})\n")
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "ringattn_conformance.cli", "run", "acme", "--tier", "core"]
    done = subprocess.run(
        [*command, "--", "-p", "printed_kernel"], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    assert "CERTIFIED for the core tier\n" in done.stdout
