# SPDX-License-Identifier: Apache-2.0
"""Promises of `import ringattn_core`: it imports no backend and nothing heavy, touches no device, writes nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

FORBIDDEN = (
    "ringattn_xla", "ringattn_triton", "ringattn_tpu", "ringattn_conformance",
    "jax.experimental.pallas", "jax.experimental.mosaic", "jax._src.pallas", "jax_triton", "triton", "torch",
    "flax", "equinox", "optax", "matplotlib", "rich", "pytest", "hypothesis", "beartype",
    "importlib_metadata",
)  # fmt: skip
PROBE = """
import json, sys
import jax
{body}
from jax._src import xla_bridge
print(json.dumps({{"modules": sorted(sys.modules), "initialised": xla_bridge.backends_are_initialized()}}))
"""


def after(body: str, home: Path | None = None) -> dict[str, Any]:
    """The modules that a fresh interpreter has loaded after `import jax` and this code."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RINGATTN_")}
    if home is not None:
        environment |= {name: str(home) for name in ("HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "RINGATTN_CACHE_DIR")}
    run = subprocess.run(
        [sys.executable, "-c", PROBE.format(body=body)], capture_output=True, text=True, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def brought_in(modules: list[str]) -> set[str]:
    return {name for name in FORBIDDEN if any(m == name or m.startswith(f"{name}.") for m in modules)}


def test_importing_core_brings_in_nothing_heavy_touches_no_device_and_writes_nothing(tmp_path: Path) -> None:
    got = after("import sys; sys.dont_write_bytecode = True; import ringattn_core", tmp_path)
    assert "ringattn_core" in got["modules"] and brought_in(got["modules"]) == set()
    assert not got["initialised"] and list(tmp_path.iterdir()) == []


def test_looking_for_backends_imports_no_kernel_and_initialises_nothing() -> None:
    got = after("from ringattn_core.backends import discovery; discovery.registrations()")
    heavy = brought_in(got["modules"]) - {"ringattn_xla", "ringattn_triton", "ringattn_tpu", "ringattn_conformance"}
    assert heavy == set()
    backends = ("ringattn_xla", "ringattn_triton", "ringattn_tpu")
    own = {name for name in got["modules"] if name.startswith(backends)}
    assert own <= {name for backend in backends for name in (backend, f"{backend}.plugin")}
    assert not got["initialised"]


def test_the_tests_above_see_what_is_brought_in_a_device_and_a_file(tmp_path: Path) -> None:
    code = "import pathlib, jax.experimental.pallas; (pathlib.Path.home() / 'cache').write_text('x'); jax.devices()"
    got = after(code, tmp_path)
    assert "jax.experimental.pallas" in brought_in(got["modules"]) and got["initialised"]
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
