# SPDX-License-Identifier: Apache-2.0
"""The backend says in a sentence why it cannot run, and is no default where it is slow."""

import sys
import types

import jax.numpy as jnp
import pytest
import triton
from ringattn_core import ring_attention
from ringattn_core.backends import discovery
from ringattn_core.backends.selection import candidates
from ringattn_core.contract.features import Feature
from ringattn_core.errors import UnsupportedFeatureError
from ringattn_triton import availability
from ringattn_triton.plugin import BACKEND


def gpu(capability="9.0", kind="NVIDIA H200"):
    return types.SimpleNamespace(platform="gpu", id=0, device_kind=kind, compute_capability=capability)


def test_a_cpu_is_told_how_to_get_a_gpu_or_the_interpreter(monkeypatch):
    monkeypatch.delenv("RINGATTN_TRITON_INTERPRET")
    reason = availability.why_unavailable()
    assert "JAX sees no GPU in this process, but cpu" in reason and "RINGATTN_TRITON_INTERPRET=1" in reason


@pytest.mark.parametrize("capability", ["8.0", "10.0", "gfx942:sramecc+:xnack-", "gfx950"])
def test_a_gpu_of_a_supported_architecture_is_enough(capability):
    assert availability._why([gpu(capability)]) is None


@pytest.mark.parametrize("capability", ["7.0", "7.5", "gfx90a", "gfx1100", ""])
def test_an_older_gpu_is_named_with_what_is_needed(capability):
    reason = availability._why([gpu(), gpu(capability, "Old GPU")])
    assert "is a Old GPU" in reason and "8.0 (Ampere)" in reason and "gfx942" in reason


def test_a_missing_triton_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    reason = availability._why([gpu()])
    assert "Triton is not installed" in reason and "pip install 'triton>=3.6'" in reason


def test_an_old_triton_is_named_with_its_version(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "3.5.1")
    assert "Triton 3.5.1 is too old: 3.6 or later" in availability._why([gpu()])


def test_the_backend_is_registered_and_declares_every_feature():
    assert discovery.get("triton").descriptor() == BACKEND
    assert all(BACKEND.supports(feature) for feature in Feature)


@pytest.mark.parametrize(("size", "value_size"), [(257, 8), (8, 576)])
def test_heads_beyond_256_are_refused_or_run_by_the_next_backend_in_order(size: int, value_size: int):
    q, v = jnp.ones((1, 8, 2, size)), jnp.ones((1, 8, 2, value_size))
    with pytest.raises(UnsupportedFeatureError, match=rf"heads of size {max(size, value_size)} .*256.*'xla'"):
        ring_attention(q, q, v, backend="triton")
    assert ring_attention(q, q, v, backend=("triton", "xla")).shape == v.shape


def test_the_backend_is_no_default_on_a_cpu_and_is_there_by_name():
    reasons = {registration.name: reason for registration, reason in candidates(frozenset(), "cpu")}
    assert "it serves cuda, rocm, gpu, not cpu" in reasons["triton"]
    assert discovery.get("triton").why_unavailable() is None
