# SPDX-License-Identifier: Apache-2.0
"""The gradients of a block, compared with those of the XLA backend."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ringattn_xla.block
from ringattn_core.contract.protocol import Block, Gradients
from ringattn_triton.block_kernel import KERNEL

from ringattn_testing.triton.given_blocks import near

TOLERANCE = {"float32": 5e-5, "float16": 5e-3, "bfloat16": 2.5e-2}
NAMES = [field.name for field in dataclasses.fields(Gradients)]


def given_to(block: Block) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """`dout, lse, delta, dq` of a ring in which half of the rows see keys of other blocks too."""
    draw = np.random.default_rng(9)
    out, lse = (np.asarray(x) for x in dataclasses.astuple(KERNEL.forward(block, None))[:2])
    others = np.where(draw.random(lse.shape) < 0.5, draw.normal(size=lse.shape), -np.inf).astype(np.float32)
    final = np.logaddexp(lse, others)
    dout = np.asarray(jnp.asarray(draw.normal(size=out.shape), block.q.dtype).astype(jnp.float32))
    share = np.exp(lse - np.where(np.isneginf(final), 0, final))
    delta = np.swapaxes((dout * out).sum(-1), 1, 2) * share + draw.normal(size=lse.shape)
    dq = draw.normal(size=block.q.shape)
    found = (jnp.asarray(x, jnp.float32) for x in (dout, final, delta, dq))
    return tuple(found)


def backward(kernel: Any, block: Block, dout: Any, *rest: Any) -> dict[str, np.ndarray]:
    """The gradients that there are."""
    found = kernel.backward(block, dout.astype(block.q.dtype), *rest)
    return {name: np.asarray(x) for name in NAMES if (x := getattr(found, name)) is not None}


def compare(case: str, got: dict[str, np.ndarray], want: dict[str, Any], tolerance: float = 5e-5) -> None:
    assert got.keys() == want.keys()
    for name, x in want.items():
        assert got[name].dtype == np.float32 and got[name].shape == x.shape, (case, name, got[name].dtype, x.shape)
        near(f"{case}: {name}", got[name], x, tolerance * max(0.1, np.abs(x).max()))


def check(block: Block, case: str) -> dict[str, np.ndarray]:
    """The gradients, if they are those of the XLA backend."""
    given = given_to(block)
    got = backward(KERNEL, block, *given)
    compare(case, got, backward(ringattn_xla.block.KERNEL, block, *given), TOLERANCE[str(block.q.dtype)])
    return got
