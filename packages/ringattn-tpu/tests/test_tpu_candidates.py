# SPDX-License-Identifier: Apache-2.0
"""Every candidate for tuning computes the same numbers."""

import jax
import numpy as np
from ringattn_core import ring_attention
from ringattn_core.tuning import Problem
from ringattn_tpu.block import KERNEL

PROBLEM = Problem(
    backend="tpu", batch=1, q_length=300, kv_length=300, heads=2, kv_heads=2, head_dim=8, value_dim=8,
    dtype="float32", platform="tpu", device="TPU v6e", versions=(),
)  # fmt: skip


def test_every_candidate_computes_the_same() -> None:
    q, k, v, dout = (jax.random.normal(key, (1, 300, 2, 8)) for key in jax.random.split(jax.random.key(3), 4))

    def of(config: object) -> list[np.ndarray]:
        out, back = jax.vjp(lambda *x: ring_attention(*x, causal=True, backend="tpu", cfg=config), q, k, v)
        return [np.asarray(x) for x in (out, *back(dout))]

    wanted = of(None)
    for config in KERNEL.candidate_configs(PROBLEM)[1::4]:
        for got, want in zip(of(config), wanted, strict=True):
            np.testing.assert_allclose(got, want, atol=3e-5)
