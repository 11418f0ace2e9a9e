# SPDX-License-Identifier: Apache-2.0
"""The descriptor imports nothing heavy and is well formed, and the implementation is what it says."""

import os
import subprocess
import sys
from importlib import metadata

from ringattn_core.backends import discovery
from ringattn_core.contract import signature
from ringattn_core.contract.backend import API_VERSIONS
from ringattn_core.contract.features import Feature, Support
from ringattn_core.contract.protocol import BlockKernel

from ringattn_conformance import tiers

pytestmark = tiers.core
FORBIDDEN = ("triton", "jax_triton", "jax.experimental.pallas", "jax._src.pallas")
DTYPES = (Feature.FLOAT32, Feature.FLOAT16, Feature.BFLOAT16)
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


def test_the_descriptor_is_well_formed(ringattn_backend: str):
    backend = discovery.get(ringattn_backend).descriptor()
    assert backend.name == ringattn_backend
    assert type(backend.api) is int and backend.api in API_VERSIONS
    assert backend.platforms
    assert all(isinstance(feature, Feature) for feature in backend.features)
    assert all(isinstance(support, Support) for support in backend.features.values())
    assert any(backend.supports(dtype) for dtype in DTYPES), "it supports no dtype at all"


def test_the_implementation_is_what_the_descriptor_says(ringattn_backend: str):
    registration = discovery.get(ringattn_backend)
    implementation = registration.implementation()
    if registration.descriptor().kernel is not None:
        assert isinstance(implementation, BlockKernel)
    else:
        assert signature.mismatch(implementation) is None
