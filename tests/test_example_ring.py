# SPDX-License-Identifier: Apache-2.0
"""Whether the example of a backend that owns its ring is short, inert, right, and honest about its faults."""

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_conformance.expectations import read
from ringattn_core import ring_attention
from ringattn_core.discovery import registered
from ringattn_core.errors import UnsupportedFeatureError

FOLDER = Path(__file__).parent.parent / "examples" / "third-party-ring"
SOURCE = FOLDER / "src"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(SOURCE)
    with registered(importlib.import_module("ringattn_example_ring.plugin").BACKEND) as registration:
        yield registration


def test_it_has_fewer_than_60_lines():
    lines = [line for path in SOURCE.rglob("*.py") for line in path.read_text().splitlines() if line.strip()]
    assert 20 < len(lines) < 60


def test_its_descriptor_imports_no_kernel():
    code = "import sys, ringattn_example_ring.plugin; sys.exit('ringattn_example_ring.gather' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(SOURCE)})


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_a_ring_of_it_agrees_with_one_of_the_xla_backend(example, layout: str):
    draw = np.random.default_rng(0)
    arrays = [draw.standard_normal((4, 2, 6, heads, 8), np.float32) for heads in (4, 2, 2)]
    sinks = draw.standard_normal(4, np.float32)

    def gradients(backend: str):
        def loss(query, key, value, sinks):
            out = ring_attention(query, key, value, sinks, causal=True, axis_name="sp", layout=layout, backend=backend)
            return jnp.sum(jnp.sin(out))

        def total(*arrays):
            return jax.vmap(loss, (0, 0, 0, None), axis_name="sp")(*arrays).sum()

        return jax.jit(jax.value_and_grad(total, (0, 1, 2, 3)))(*arrays, sinks)

    for got, want in zip(*(jax.tree.leaves(gradients(name)) for name in ("example-ring", "xla")), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=5e-5)


def test_what_it_does_not_declare_raises(example):
    x = jnp.ones((1, 8, 2, 4))
    with pytest.raises(UnsupportedFeatureError, match="'example-ring' does not support BIAS"):
        ring_attention(x, x, x, None, jnp.ones((1, 1, 8, 8)), backend="example-ring")


def test_the_failures_that_it_expects_are_its_own_and_have_reasons():
    found = read(Path("pyproject.toml"), FOLDER)
    declared = tomllib.loads((FOLDER / "pyproject.toml").read_text())["project"]["entry-points"]["ringattn.backends"]
    assert found.backends == set(declared) == {"example-ring"}
    assert len(found.of("example-ring")) == 9 and not found.of("xla")
