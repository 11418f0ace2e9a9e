# SPDX-License-Identifier: Apache-2.0
"""In contiguous order, "ulysses" gives the bits of one device, and "all_gather" those of its output.

One device plays all ranks. `benchmarks/equal_bits.py` draws calls, and runs on a GPU too; docs/promises.md says what
holds there.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core import ring_attention
from ringattn_triton.portable import schedules

TOKENS, HEADS, KV_HEADS, SIZE = 96, 4, 2, 16
DRAW = np.random.default_rng(0)
QUERY, KEY, VALUE, DOUT = (
    jnp.asarray(DRAW.normal(size=(1, TOKENS, heads, SIZE)), jnp.bfloat16)
    for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
)
IDS = np.repeat(np.array([[0, 1, 2, -1]], np.int32), (40, 30, 20, 6), 1)
OPTIONS: dict[str, Any] = {
    "causal": True, "dropout_prob": 0.3, "dropout_seed": np.uint32(7), "logits_soft_cap": 3.0, "return_lse": True,
    "softmax_aux": DRAW.normal(size=HEADS).astype(np.float32), "backend": "triton",
    "alibi_slopes": np.array([0.5, 0.1, 0.02, 0.3], np.float32),
}  # fmt: skip


def results(ranks: int, strategy: str = "ring", gradients: bool = True) -> dict[str, np.ndarray]:
    """The output, the log-sum-exp, and the gradients of query, key and value, of all ranks in natural order."""

    def split(x: Any) -> Any:
        return x.reshape(1, ranks, -1, *x.shape[2:])

    def local(query: Any, key: Any, value: Any, ids: Any) -> Any:
        return ring_attention(query, key, value, q_segment_ids=ids, axis_name="sp", strategy=strategy, **OPTIONS)

    def attend(query: Any, key: Any, value: Any) -> Any:
        arrays = *map(split, (query, key, value)), split(IDS)
        out, lse = jax.vmap(local, 1, (1, 2), axis_name="sp")(*arrays)
        return out.reshape(QUERY.shape), lse.reshape(1, HEADS, TOKENS)

    def all_results(*arrays: Any) -> Any:
        if not gradients:
            return attend(*arrays)
        found, pull = jax.vjp(attend, *arrays)
        return *found, *pull((DOUT, jnp.zeros_like(found[1])))

    found = jax.jit(all_results)(QUERY, KEY, VALUE)
    return {name: np.float32(x) for name, x in zip(("out", "lse", "dq", "dk", "dv"), found, strict=False)}


def differing(ranks: int, strategy: str) -> list[str]:
    gradients = strategy == "ulysses"
    found, alone = results(ranks, strategy, gradients), results(1, gradients=gradients)
    return [name for name in found if not np.array_equal(found[name], alone[name])]


@pytest.mark.parametrize("strategy", ["ulysses", "all_gather"])
def test_a_ring_of_two_has_the_bits_of_one_device(strategy: str):
    assert differing(2, strategy) == []


@pytest.mark.parametrize(
    ("strategy", "of_shard"),
    [("all_gather", lambda block: block.q_length), ("ulysses", lambda block: block.q.shape[2])],
)
def test_tiles_by_the_length_or_the_heads_of_a_shard_have_other_bits(
    strategy: str, of_shard: Any, monkeypatch: pytest.MonkeyPatch
):
    """So the test above sees such a fault: a rank then has tiles of 16 keys, and one device tiles of 32."""
    right, whole = schedules.forward, {"all_gather": TOKENS, "ulysses": HEADS}[strategy]

    def wrong(block: Any, *rest: Any) -> schedules.Schedule:
        return dataclasses.replace(right(block, *rest), kv_tile=32 if of_shard(block) == whole else 16)

    monkeypatch.setattr(schedules, "forward", wrong)
    jax.clear_caches()  # kernels choose their tiles where they are traced
    try:
        assert "out" in differing(2, strategy)
    finally:
        jax.clear_caches()
