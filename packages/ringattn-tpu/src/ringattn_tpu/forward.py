# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a block: what its kernel is given, and the partial result from what it returns."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from ringattn_core.contract.protocol import SHIFT_BELOW, Block, Partial
from ringattn_core.contract.tile_padding import padded
from ringattn_core.contract.varying import align, axes_of

from . import block_sizes
from .block_sizes import LANES
from .kernel_inputs import KernelInputs, prepared
from .kernels.forward import LOWEST
from .kernels.forward import forward as forward_kernel
from .kernels.scores import own_integers
from .launch import Grid, launch
from .steps import steps


@jax.jit
def forward(block: Block, partial: Partial | None) -> Partial:
    """`partial` continued with the keys of the block."""
    block, partial = align((block, partial), axes_of(block, partial))
    q_length = block.q_length
    sizes = block_sizes.choose(block, block.rule.fwd_params)
    given = prepared(block, sizes)
    batch, _, heads, _ = block.q.shape
    value_dim, tile, settings = block.value_dim, sizes.q_tile, given.settings
    dtype = block.q.dtype if block.final else jnp.float32
    inputs = given.operands(by_keys=False)
    results = {
        "out": (jax.ShapeDtypeStruct((batch, heads, sizes.q_length, value_dim), dtype), "BNT."),
        "softmax": (jax.ShapeDtypeStruct((batch, heads, 2, sizes.q_length), jnp.float32), "BN.T"),
    }
    if partial is not None:
        before = {"out": padded(jnp.swapaxes(partial.out, 1, 2), sizes.q_length, 2), "softmax": _begun(given, partial)}
        inputs |= {name: given.operand(x, results[name][1], by_keys=False) for name, x in before.items()}
    scratch = {
        "acc": pltpu.VMEM((tile, value_dim), jnp.float32),
        "largest": pltpu.VMEM((tile, LANES), jnp.float32),
        "total": pltpu.VMEM((tile, LANES), jnp.float32),
    }
    if settings.q_rows:
        scratch["columns"] = pltpu.VMEM((len(own_integers(settings, False)), tile, LANES), jnp.int32)
    found = launch(
        functools.partial(forward_kernel, settings=settings, part=sizes.part_of(sizes.kv_tile)),
        steps(given.block, tile, sizes.kv_tile, every_own=partial is None),
        Grid(batch, heads),
        inputs,
        {name: given.operand(x, axes, by_keys=False) for name, (x, axes) in results.items()},
        scratch=scratch,
        aliases={} if partial is None else {"out": "out", "softmax": "softmax"},
        cost=given.cost(products=2),
        name="ringattn_forward",
    )
    out = jnp.swapaxes(found["out"][:, :, :q_length], 1, 2)
    return _result(given, out, found["softmax"][..., :q_length])


def _begun(given: KernelInputs, partial: Partial) -> jax.Array:
    """The largest score and the sum of each row that `partial` stands for, in the kernel's units."""
    nothing = jnp.isneginf(partial.lse)
    largest, total = partial.lse, jnp.ones_like(partial.lse)
    if partial.shift is not None:
        largest = partial.shift + partial.lse
        total = jnp.exp(partial.lse - (largest - partial.shift))
    largest = jnp.where(nothing, LOWEST, largest * given.settings.unit)
    return padded(jnp.stack([largest, jnp.where(nothing, 0.0, total)], 2), given.sizes.q_length, 3)


def _result(given: KernelInputs, out: jax.Array, softmax: jax.Array) -> Partial:
    """The partial result of the rows whose largest score and sum are `softmax`."""
    largest, total = softmax[:, :, 0] / given.settings.unit, softmax[:, :, 1]
    if not given.settings.bias:
        return Partial(out, jnp.where(total == 0.0, -jnp.inf, largest + jnp.log(total)))
    shift = jnp.where((largest < SHIFT_BELOW) & (total != 0.0), largest, 0.0)
    return Partial(out, jnp.where(total == 0.0, -jnp.inf, (largest - shift) + jnp.log(total)), shift)
