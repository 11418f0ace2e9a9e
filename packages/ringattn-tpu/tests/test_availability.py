# SPDX-License-Identifier: Apache-2.0
"""The backend says in a sentence why it cannot run at all or not this call, and is no default where it is slow."""

import types

import jax.numpy as jnp
import pytest
from ringattn_core.backends import discovery
from ringattn_core.backends.selection import candidates
from ringattn_core.errors import InputError, UnsupportedFeatureError
from ringattn_tpu import availability, ring_attention


def tpu(kind: str = "TPU v6 lite", number: int = 0):
    return types.SimpleNamespace(platform="tpu", id=number, device_kind=kind)


def test_a_cpu_is_told_how_to_get_a_tpu_or_the_interpreter(monkeypatch):
    monkeypatch.delenv("RINGATTN_TPU_INTERPRET")
    reason = availability.why_unavailable()
    assert reason is not None
    assert "JAX sees no TPU in this process, but cpu" in reason
    assert "pip install 'jax[tpu]'" in reason and "RINGATTN_TPU_INTERPRET=1" in reason


@pytest.mark.parametrize("value", ["0", "", "true", "yes"])
def test_only_1_asks_for_the_interpreter(value, monkeypatch):
    monkeypatch.setenv("RINGATTN_TPU_INTERPRET", value)
    assert availability.why_unavailable() is not None


@pytest.mark.parametrize("kind", ["TPU v5 lite", "TPU v5p", "TPU7x", "TPU next"])
def test_a_tpu_of_a_supported_generation_is_enough_without_the_variable(kind, monkeypatch):
    monkeypatch.delenv("RINGATTN_TPU_INTERPRET")
    assert availability._why([tpu(kind)]) is None


@pytest.mark.parametrize("kind", ["TPU v3", "TPU v4 lite"])
def test_an_older_tpu_is_named_with_what_is_needed(kind):
    reason = availability._why([tpu(), tpu(kind, 3)])
    assert reason == f"device 3 is a {kind}; the kernels are for TPU v5e, v5p, v6e, 7x and later"


def test_the_backend_is_no_default_on_a_cpu_and_is_there_by_name():
    on_cpu, on_tpu = (
        {registration.name: reason for registration, reason in candidates(frozenset(), platform)}
        for platform in ("cpu", "tpu")
    )
    assert "it serves tpu, not cpu" in (on_cpu["tpu"] or "") and on_tpu["tpu"] is None
    assert next(iter(on_tpu)) == "tpu", "on a TPU it is the default"
    assert discovery.get("tpu").why_unavailable() is None


def of(dtype=jnp.float32, length=8, head_dim=8):
    return jnp.ones((1, length, 1, head_dim), dtype)


def test_float16_is_refused_with_the_reason():
    x = of(jnp.float16)
    with pytest.raises(UnsupportedFeatureError, match=r"FLOAT16 \(not declared: .*has no float16; use bfloat16\)"):
        ring_attention(x, x, x)


@pytest.mark.parametrize("queries, values", [(257, 257), (64, 264)])
def test_heads_that_no_kernel_holds_are_refused(queries, values):
    q, v = of(head_dim=queries), of(head_dim=values)
    with pytest.raises(UnsupportedFeatureError, match=rf"heads of size {values} \(the largest is 256\)"):
        ring_attention(q, q, v)


def test_tiles_too_short_for_the_list_of_steps_are_refused_with_the_limit():
    x = of(jnp.bfloat16, length=128 * 400)
    with pytest.raises(InputError, match=r"tiles of 128 and 128 make more than 131072 steps"):
        ring_attention(x, x, x, fwd_params={"q_blocksize": 128, "kv_blocksize": 128})
