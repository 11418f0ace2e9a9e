# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a block: the inputs of its kernel, and the partial result from the kernel's outputs."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from ringattn_core.contract.protocol import Block, Partial, padded

from . import block_sizes
from .block_sizes import LANES
from .kernel_inputs import LOG2_E, KernelInputs, prepared
from .kernels import forward as kernel
from .launch import Grid
from .steps import steps


@jax.jit
def forward(block: Block, partial: Partial | None) -> Partial:
    """Continues the online softmax of `partial` with the keys of the block; `None` starts a new one."""
    given = prepared(block, block_sizes.choose(block, block.rule.fwd_params))
    sizes, value_dim = given.sizes, block.value_dim
    batch, q_length, heads, _ = block.q.shape
    inputs, axes = given.operands(by_keys=False), {"out": "BNT.", "softmax": "BN.T"}
    shapes = {
        "out": ((batch, heads, sizes.q_length, value_dim), block.q.dtype if block.final else jnp.float32),
        "softmax": ((batch, heads, 2, sizes.q_length), jnp.float32),
    }
    outputs = {n: given.operand(jax.ShapeDtypeStruct(*shape), axes[n], by_keys=False) for n, shape in shapes.items()}
    if partial is not None:
        before = {"out": padded(jnp.swapaxes(partial.out, 1, 2), sizes.q_length, 2), "softmax": _begun(given, partial)}
        inputs |= {n: given.operand(x, axes[n], by_keys=False) for n, x in before.items()}
    widths = {"acc": value_dim, "largest": LANES, "total": LANES}
    found = given.launch(
        kernel.forward,
        steps(given.block, sizes.q_tile, sizes.kv_tile, every_own=partial is None),
        Grid(batch, heads),
        inputs,
        outputs,
        {name: pltpu.VMEM((sizes.q_tile, width), jnp.float32) for name, width in widths.items()},
        by_keys=False,
        products=2,
    )
    out = jnp.swapaxes(found["out"][:, :, :q_length], 1, 2)
    return _result(block, out, found["softmax"][..., :q_length])


def _begun(given: KernelInputs, partial: Partial) -> jax.Array:
    """The state of the online softmax that `partial` stands for, `[B, N, 2, T]`: a maximum and a sum for each query.

    The maximum is in units of log2. Without `max_logits`, the lse serves as the maximum, so the sum relative to it is
    1. A query that has seen no key has sum 0.
    """
    nothing, known = jnp.isneginf(partial.lse), partial.max_logits
    largest = jnp.where(nothing, kernel.LOWEST, (partial.lse if known is None else known) * LOG2_E)
    total = jnp.where(nothing, 0.0, 1.0 if known is None else jnp.exp2(partial.lse * LOG2_E - largest))
    return padded(jnp.stack([largest, total], 2), given.sizes.q_length, 3)


def _result(block: Block, out: jax.Array, softmax: jax.Array) -> Partial:
    """The partial result from `out` and the final maximum and sum of each query, `softmax [B, N, 2, T]`."""
    largest, total = softmax[:, :, 0], softmax[:, :, 1]
    # The sum is taken in units of log2, so that a block that no query sees leaves the bits of lse unchanged.
    lse = jnp.where(total == 0.0, -jnp.inf, (largest + jnp.log2(total)) / LOG2_E)
    max_logits = jnp.where(total == 0.0, -jnp.inf, largest / LOG2_E) if block.rule.return_max_logits else None
    return Partial(out, lse, max_logits)
