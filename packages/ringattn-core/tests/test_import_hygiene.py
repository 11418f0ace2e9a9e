# SPDX-License-Identifier: Apache-2.0
"""Promises of `import ringattn_core`: it imports no backend and nothing heavy, touches no device, writes nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FORBIDDEN = (
    "ringattn_xla", "ringattn_triton", "ringattn_tpu", "ringattn_conformance",
    "jax.experimental.pallas", "jax.experimental.mosaic", "jax._src.pallas", "jax_triton", "triton", "torch",
    "flax", "equinox", "optax", "matplotlib", "rich", "pytest", "hypothesis", "beartype",
    "importlib_metadata",
)  # fmt: skip
LOADED = "import ringattn_core"
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


def test_importing_core_brings_in_no_backend_and_nothing_heavy() -> None:
    got = after(LOADED)
    assert brought_in(got["modules"]) == set()
    assert "ringattn_core" in got["modules"]


def test_importing_core_initialises_no_jax_backend() -> None:
    assert not after(LOADED)["initialised"]


def test_looking_for_backends_imports_no_kernel_and_initialises_nothing() -> None:
    got = after("from ringattn_core.backends import discovery; discovery.registrations()")
    heavy = brought_in(got["modules"]) - {"ringattn_xla", "ringattn_triton", "ringattn_tpu", "ringattn_conformance"}
    assert heavy == set()
    assert not any(name.startswith("ringattn_") and "kernel" in name for name in got["modules"])
    assert not got["initialised"]


def test_importing_core_writes_nothing_to_the_home(tmp_path: Path) -> None:
    after("import sys; sys.dont_write_bytecode = True; " + LOADED, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["jax.experimental.pallas", "hypothesis"])
def test_the_test_above_sees_what_is_brought_in(name: str) -> None:
    assert name in brought_in(after(f"import ringattn_core, {name}")["modules"])


def test_the_test_above_sees_a_backend_of_ours(tmp_path: Path) -> None:
    (tmp_path / "ringattn_tpu").mkdir()
    (tmp_path / "ringattn_tpu" / "__init__.py").write_text("")
    got = after(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import ringattn_core, ringattn_tpu")
    assert brought_in(got["modules"]) == {"ringattn_tpu"}


def test_the_test_above_sees_an_initialised_backend() -> None:
    assert after("import ringattn_core; jax.devices()")["initialised"]


def test_the_test_above_sees_a_file_that_is_written(tmp_path: Path) -> None:
    after("import pathlib; (pathlib.Path.home() / 'cache').write_text('x')", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
