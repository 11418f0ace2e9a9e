# SPDX-License-Identifier: Apache-2.0
"""A query sees the keys that its range, its segment id and its bits say, in the forward and every backward kernel."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.contract.protocol import Block, Partial
from ringattn_core.masks import Numpy
from ringattn_testing.random_blocks import random_ids
from ringattn_testing.random_blocks import random_mask as dense_mask
from ringattn_testing.tpu.blocks import make_block, ranges
from ringattn_tpu.block import KERNEL
from ringattn_xla.block import KERNEL as REFERENCE

BATCH, Q_LENGTH, KV_LENGTH, HEADS = 2, 150, 300, 4
TOLERANCE = 2e-5


def bias(*shape: int) -> np.ndarray:
    return np.random.default_rng(5).normal(size=(*shape, KV_LENGTH)).astype(np.float32)


def chosen(groups: int, size: int, count: int = 2) -> dict[str, Any]:
    """Blocks of `size` keys at random for each query and group; some queries choose none."""
    ids = np.random.default_rng(size).integers(-1, -(-KV_LENGTH // size), (BATCH, Q_LENGTH, groups, count))
    return {"selected": ids, "selected_size": size}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "ranges, in one pass": lambda: {"kv_range": ranges(1, 1, Q_LENGTH, KV_LENGTH)},
    "ranges of rows, with a bias": lambda: {"kv_range": ranges(2, 1, Q_LENGTH, KV_LENGTH), "bias": bias(1, 1, 1)},
    "ranges of heads and segment ids, in one pass": lambda: {
        "kv_range": ranges(1, HEADS, Q_LENGTH, KV_LENGTH),
        "q_segments": random_ids(1, Q_LENGTH).repeat(BATCH, 0),
        "kv_segments": random_ids(1, KV_LENGTH).repeat(BATCH, 0),
    },
    "ranges of rows and heads, dropout and slopes": lambda: {
        "kv_range": ranges(2, HEADS, Q_LENGTH, KV_LENGTH),
        "slopes": np.float32([[0.5, 0.1, 0.2, 0.3]]),
        "dropout_prob": 0.2,
        "seed": np.uint32([3, 4]),
    },
    "bits of heads, in words of 16, with a bias of heads": lambda: {
        "masks": tuple(Numpy(part) for part in dense_mask(2, Q_LENGTH, KV_LENGTH)),
        "mask_of_head": (1, 0, 0, 1),
        "bias": bias(BATCH, HEADS, Q_LENGTH),
    },
    "blocks of 16 of key heads, in one pass": lambda: chosen(2, 16),
    "blocks of 64 of heads, with a bias": lambda: {**chosen(HEADS, 64), "bias": bias(1, HEADS, 1)},
    "blocks of 96 of all heads, with slopes": lambda: {
        **chosen(1, 96),
        "slopes": np.float32([[0.5, 0.1, 0.2, 0.3]]),
        "tile": 384,
    },
    "blocks of 128 and a causal mask": lambda: {**chosen(2, 128), "causal": True, "tile": 256},
    "blocks of 5": lambda: chosen(2, 5),
    "blocks of 4 in two words": lambda: {**chosen(1, 4, 20), "tile": 256},
    "bits of rows, in words of 32": lambda: {"mask": dense_mask(BATCH, 1, Q_LENGTH, KV_LENGTH), "tile": 256},
}


def results(kernel: Any, block: Block, final_lse: Any = None) -> dict[str, Any]:
    """What a kernel computes of the block, begun from nothing and from a partial result, and the gradients."""
    draw = np.random.default_rng(1)
    out, dq, dout = (jnp.asarray(draw.normal(size=block.q.shape), jnp.float32) for _ in range(3))
    lse, delta = (jnp.asarray(draw.normal(size=(BATCH, HEADS, Q_LENGTH)), jnp.float32) for _ in range(2))
    fresh, partial = kernel.forward(block, None), kernel.forward(block, Partial(out, lse))
    gradients = kernel.backward(block, dout, partial.lse, delta, dq)
    found = {"out": fresh.out, "lse": fresh.lse, "continued out": partial.out, "continued lse": partial.lse}
    return found | {name: getattr(gradients, name) for name in ("dq", "dk", "dv", "dbias", "dslopes")}


@pytest.mark.parametrize("case", CASES)
def test_kernels_compute_what_plain_jax_does(case: str):
    fields = CASES[case]()
    tile = fields.pop("tile", 128)
    params = {"q_blocksize": tile, "kv_blocksize": tile, "extra": {"part": 128}}
    block = make_block(BATCH, Q_LENGTH, KV_LENGTH, HEADS, kv_heads=2, dim=16, params=params, **fields)
    got = results(KERNEL, block)
    for name, want in results(REFERENCE, block).items():
        if want is not None:
            scale = max(0.1, float(jnp.abs(jnp.where(jnp.isfinite(want), want, 0)).max()))
            np.testing.assert_allclose(got[name], want, rtol=0, atol=TOLERANCE * scale, err_msg=f"{case}: {name}")
