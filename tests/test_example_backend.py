# SPDX-License-Identifier: Apache-2.0
"""Whether the example of a third party's backend is short, right, and refuses what it does not declare."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core import ring_attention
from ringattn_core.discovery import registered
from ringattn_core.errors import UnsupportedFeatureError

SOURCE = Path(__file__).parent.parent / "examples" / "third-party-backend" / "src"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(SOURCE)
    with registered(importlib.import_module("ringattn_example.plugin").BACKEND) as registration:
        yield registration


def test_it_has_fewer_than_60_lines():
    lines = [line for path in SOURCE.rglob("*.py") for line in path.read_text().splitlines() if line.strip()]
    assert 20 < len(lines) < 60


def test_its_descriptor_imports_no_kernel():
    code = "import sys, ringattn_example.plugin; sys.exit('ringattn_example.block' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(SOURCE)})


DOCUMENTS = np.arange(2 * 24, dtype=np.int32).reshape(2, 24) // 9


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": True},
        {"causal": True, "sliding_window": 7},
        {"q_segment_ids": DOCUMENTS},
    ],
    ids=["full", "causal", "window", "segments"],
)
def test_it_agrees_with_the_xla_backend_in_value_and_gradients(example: Any, options: dict[str, Any]):
    draw = np.random.default_rng(0)
    query, key, value = (draw.standard_normal((2, 24, heads, 16), np.float32) for heads in (4, 2, 2))
    sinks = draw.standard_normal(4, np.float32)

    def loss(*arrays: jax.Array, backend: str) -> jax.Array:
        return jnp.sum(jnp.sin(ring_attention(*arrays, **options, backend=backend)))

    arrays = (query, key, value, sinks)
    mine, theirs = (jax.value_and_grad(loss, (0, 1, 2, 3))(*arrays, backend=name) for name in ("example", "xla"))
    for got, want in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(got, want, atol=5e-5)


def test_what_it_does_not_declare_raises(example: Any):
    x = jnp.ones((1, 8, 2, 4))
    with pytest.raises(UnsupportedFeatureError, match="'example' does not support SOFT_CAP"):
        ring_attention(x, x, x, logits_soft_cap=5.0, backend="example")
