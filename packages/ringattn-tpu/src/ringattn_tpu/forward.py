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
from .launch import Grid, generation
from .steps import steps


@jax.jit
def forward(block: Block, partial: Partial | None) -> Partial:
    """Continues the online softmax of `partial` with the keys of the block; `None` starts a new one."""
    given = prepared(block, block_sizes.choose(block, block.rule.fwd_params))
    sizes, value_dim = given.sizes, block.value_dim
    batch, q_length, heads, _ = block.q.shape
    inputs, axes = given.operands(by_keys=False), {"out": "BNT.", "softmax": "BN.T"}
    asked = block.rule.return_max_logits
    shapes = {
        "out": ((batch, heads, sizes.q_length, value_dim), block.q.dtype if block.final else jnp.float32),
        "softmax": ((batch, heads, 2 + asked, sizes.q_length), jnp.float32),
    }
    outputs = {n: given.operand(jax.ShapeDtypeStruct(*shape), axes[n], by_keys=False) for n, shape in shapes.items()}
    before = {} if partial is None else _begun(given, partial)
    inputs |= {n: given.operand(x, axes[n], by_keys=False) for n, x in before.items()}
    scratch = {"query_terms": pltpu.VMEM((sizes.q_tile, 2 * LANES), block.q.dtype)} if _in_two_terms(block) else {}
    widths = {"acc": value_dim, "base": LANES, "total": LANES} | ({"largest": LANES} if asked else {})
    found = given.launch(
        kernel.forward,
        steps(given.block, sizes.q_tile, sizes.kv_tile, every_own="out" not in before),
        Grid(batch, heads),
        inputs,
        outputs,
        scratch | {name: pltpu.VMEM((sizes.q_tile, width), jnp.float32) for name, width in widths.items()},
        by_keys=False,
        products=2,
    )
    out = jnp.swapaxes(found["out"][:, :, :q_length], 1, 2)
    return _result(out, found["softmax"][..., :q_length])


def _in_two_terms(block: Block) -> bool:
    """Whether the kernel keeps its queries as two terms (`kernels/query_terms.py`): if both fit a matrix unit."""
    units_are_wide = generation() >= 6
    return block.q.dtype == jnp.bfloat16 and block.q.shape[-1] <= LANES and units_are_wide


def _begun(given: KernelInputs, partial: Partial) -> dict[str, jax.Array]:
    """The output to continue, if there is one, and the state of the online softmax `[B, N, 2 or 3, T]`, by name.

    The state is the number that is subtracted from scores, which is the lse, and the sum relative to it: 1, 0 if
    nothing is in the denominator yet, or NaN where the lse is NaN, so that the output is NaN even if the query sees no
    key. If asked for, the largest score follows. All are in units of log2.
    """
    nothing = jnp.isneginf(partial.lse)
    weight = jnp.where(nothing, 0.0, jnp.where(jnp.isnan(partial.lse), jnp.nan, 1.0))
    state = [jnp.where(nothing, kernel.LOWEST, partial.lse * LOG2_E), weight]
    state += [] if partial.max_logits is None else [partial.max_logits * LOG2_E]
    arrays = {"softmax": padded(jnp.stack(state, 2), given.sizes.q_length, 3)}
    if partial.out is not None:
        arrays["out"] = padded(jnp.swapaxes(partial.out, 1, 2), given.sizes.q_length, 2)
    return arrays


def _result(out: jax.Array, softmax: jax.Array) -> Partial:
    """The partial result from `out` and the final state of the online softmax (`_begun`)."""
    base, total, *largest = (softmax[:, :, row] for row in range(softmax.shape[2]))
    # The sum is taken in units of log2, so that a block that no query sees leaves the bits of lse unchanged.
    lse = jnp.where(total == 0.0, -jnp.inf, (base + jnp.log2(total)) / LOG2_E)
    return Partial(out, lse, *(x / LOG2_E for x in largest))
