# SPDX-License-Identifier: Apache-2.0
"""Promises of the candidates: each cuts the block in a way of its own, and every one computes the same numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core import ring_attention
from ringattn_core.tuning import Problem
from ringattn_xla.block import KERNEL
from ringattn_xla.tiling import cut


def problem(q_length: int = 4096, kv_length: int = 4096, heads: int = 8, kv_heads: int = 8) -> Problem:
    return Problem(
        backend="xla", batch=1, q_length=q_length, kv_length=kv_length, heads=heads, kv_heads=kv_heads, head_dim=64,
        value_dim=64, dtype="float32", platform="cpu", device="cpu", versions=(),
    )  # fmt: skip


def cuts(given: Problem) -> list[tuple[int, int]]:
    params = [config.fwd_params for config in KERNEL.candidate_configs(given)]
    return [(cut(given.q_length, p.q_blocksize or 0), cut(given.kv_length, p.kv_blocksize or 0)) for p in params]


@pytest.mark.parametrize(
    "given",
    [problem(), problem(96, 96), problem(1000, 300), problem(heads=32)],
    ids=lambda p: f"{p.q_length} {p.heads}",
)
def test_no_two_cut_a_block_alike(given: Problem) -> None:
    found = cuts(given)
    assert 1 <= len(set(found)) == len(found) <= 15


def test_none_cuts_a_block_as_the_kernel_does_by_itself() -> None:
    assert cuts(problem(40, 40)) == []
    assert (512, 512) not in cuts(problem())
    assert (128, 512) not in cuts(problem(heads=32))
    assert (64, 128) in cuts(problem())


def test_every_candidate_computes_the_same() -> None:
    x = jax.random.normal(jax.random.key(0), (1, 300, 2, 8))

    def gradient(**options: Any) -> jax.Array:
        return jax.grad(lambda x: jnp.sin(ring_attention(x, x, x, causal=True, backend="xla", **options)).sum())(x)

    want = gradient()
    candidates = KERNEL.candidate_configs(problem(300, 300, 2, 2))
    assert len(candidates) >= 4
    for config in candidates[:: len(candidates) // 3]:
        np.testing.assert_allclose(gradient(cfg=config), want, atol=5e-5)
