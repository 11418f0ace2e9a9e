# SPDX-License-Identifier: Apache-2.0
"""A backend's descriptor imports no kernel and has valid fields; its implementation has all methods that core calls."""

import os
import subprocess
import sys
from importlib import metadata

from ringattn_core.backends import discovery

from ringattn_conformance import tiers

pytestmark = tiers.core
FORBIDDEN = ("triton", "jax_triton", "jax.experimental.pallas", "jax._src.pallas")
LOADS_INERTLY = """
import sys
from importlib import metadata
import ringattn_core
before = set(sys.modules)
(entry,) = metadata.entry_points(group={group!r}, name={name!r})
entry.load()
heavy = sorted(name for name in set(sys.modules) - before if name.startswith({forbidden!r}))
sys.exit("it imports " + ", ".join(heavy) if heavy else 0)
"""


def test_importing_the_descriptor_imports_no_kernel_and_touches_no_device(ringattn_backend: str):
    if not metadata.entry_points(group=discovery.GROUP, name=ringattn_backend):
        assert discovery.get(ringattn_backend).distribution == "this process"
        return
    code = LOADS_INERTLY.format(group=discovery.GROUP, name=ringattn_backend, forbidden=FORBIDDEN)
    # JAX raises if anything uses a device, because there is no such platform.
    environment = {**os.environ, "JAX_PLATFORMS": "nowhere"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_registered_is_well_formed(ringattn_backend: str):
    """Core raises for a wrong field, a class, a hash that changes, a missing method, or another signature."""
    discovery.get(ringattn_backend).implementation()
