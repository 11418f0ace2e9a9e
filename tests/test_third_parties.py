# SPDX-License-Identifier: Apache-2.0
"""The examples of third-party backends are short, inert and correct, and refuse what they do not declare."""

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core import ring_attention
from ringattn_core.backends.discovery import registered
from ringattn_core.errors import UnsupportedFeatureError

EXAMPLES = Path(__file__).parent.parent / "examples"
BLOCK, RING = EXAMPLES / "third-party-backend", EXAMPLES / "third-party-ring"
KERNELS = {BLOCK: "ringattn_example.block", RING: "ringattn_example_ring.gather"}
DOCUMENTS = np.arange(2 * 24, dtype=np.int32).reshape(2, 24) // 9

both = pytest.mark.parametrize("folder", KERNELS, ids=lambda folder: folder.name)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(BLOCK / "src")
    monkeypatch.syspath_prepend(RING / "src")
    block, ring = (importlib.import_module(f"{name.split('.')[0]}.plugin").BACKEND for name in KERNELS.values())
    with registered(block), registered(ring):
        yield


@both
def test_it_has_fewer_than_60_lines(folder: Path):
    lines = [line for path in (folder / "src").rglob("*.py") for line in path.read_text().splitlines() if line.strip()]
    assert 20 < len(lines) < 60


@both
def test_its_descriptor_imports_no_kernel(folder: Path):
    kernel = KERNELS[folder]
    code = f"import sys, {kernel.split('.')[0]}.plugin; sys.exit({kernel!r} in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": str(folder / "src")})


@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"causal": True, "sliding_window": 7}, {"q_segment_ids": DOCUMENTS}],
    ids=["full", "causal", "window", "segments"],
)
def test_a_block_of_it_agrees_with_the_xla_backend_in_value_and_gradients(install: None, options: dict[str, Any]):
    draw = np.random.default_rng(0)
    query, key, value = (draw.standard_normal((2, 24, heads, 16), np.float32) for heads in (4, 2, 2))
    sinks = draw.standard_normal(4, np.float32)

    def loss(*arrays: jax.Array, backend: str) -> jax.Array:
        return jnp.sum(jnp.sin(ring_attention(*arrays, **options, backend=backend)))

    arrays = (query, key, value, sinks)
    mine, theirs = (jax.value_and_grad(loss, (0, 1, 2, 3))(*arrays, backend=name) for name in ("example", "xla"))
    for got, want in zip(jax.tree.leaves(mine), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(got, want, atol=5e-5)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_a_ring_of_it_agrees_with_one_of_the_xla_backend(install: None, layout: str):
    draw = np.random.default_rng(0)
    arrays = [draw.standard_normal((4, 2, 6, heads, 8), np.float32) for heads in (4, 2, 2)]
    sinks = draw.standard_normal(4, np.float32)

    def gradients(backend: str) -> Any:
        def loss(query: Any, key: Any, value: Any, sinks: Any) -> jax.Array:
            out = ring_attention(query, key, value, sinks, causal=True, axis_name="sp", layout=layout, backend=backend)
            return jnp.sum(jnp.sin(out))

        def total(*arrays: Any) -> jax.Array:
            return jax.vmap(loss, (0, 0, 0, None), axis_name="sp")(*arrays).sum()

        return jax.jit(jax.value_and_grad(total, (0, 1, 2, 3)))(*arrays, sinks)

    for got, want in zip(*(jax.tree.leaves(gradients(name)) for name in ("example-ring", "xla")), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize(
    ("backend", "feature", "arrays", "soft_cap"),
    [("example", "SOFT_CAP", (), 5.0), ("example-ring", "BIAS", (None, np.ones((1, 1, 8, 8))), None)],
    ids=["example", "example-ring"],
)
def test_what_it_does_not_declare_raises(install: None, backend: str, feature: str, arrays: Any, soft_cap: Any):
    x = jnp.ones((1, 8, 2, 4))
    with pytest.raises(UnsupportedFeatureError, match=f"'{backend}' does not support {feature}"):
        ring_attention(x, x, x, *arrays, logits_soft_cap=soft_cap, backend=backend)
