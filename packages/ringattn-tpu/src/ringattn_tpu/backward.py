# SPDX-License-Identifier: Apache-2.0
"""The backward pass of a block: which kernels compute its gradients, and from which inputs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import tpu as pltpu
from ringattn_core.contract.protocol import Block, Gradients, padded
from ringattn_core.contract.varying import align, axes_of

from . import block_sizes
from .block_sizes import LANES, SUBLANES
from .kernel_inputs import LOG2_E, KernelInputs, prepared
from .kernels.backward_bias import backward_bias
from .kernels.backward_fused import backward_fused
from .kernels.backward_keys import backward_keys
from .kernels.backward_queries import backward_queries
from .launch import VMEM_LIMIT, At, Grid, Operand
from .steps import FIRST, Steps, steps

Found = dict[str, jax.Array]
Inputs = dict[str, Operand]


@jax.jit
def backward(block: Block, dout: jax.Array, lse: jax.Array, delta: jax.Array, dq: jax.Array | None) -> Gradients:
    """The gradients of the block. `dq` of the result is the gradient plus the argument `dq`, if there is one."""
    q_length, kv_length = block.q_length, block.kv_length
    given = prepared(block, block_sizes.choose(block, block.rule.bwd_params))
    given = _with_rows(given, dout, lse, delta)
    if dq is not None:
        dq = padded(jnp.swapaxes(dq, 1, 2), given.sizes.q_length, 2)
    of_keys = steps(given.block, given.sizes.q_tile, given.sizes.kv_tile, by_keys=True, every_own=True)
    bias = None if block.bias_fixed else block.bias
    fused = _fits_in_one_pass(given, of_keys)
    inputs = {} if fused and bias is None else given.operands(by_keys=False)
    found = _fused(given, of_keys, dq) if fused else {**_keys(given, of_keys), **_queries(given, inputs, dq)}
    dk, dv = (jnp.swapaxes(found[name][:, :, :kv_length], 1, 2) for name in ("dk", "dv"))
    dq = jnp.swapaxes(found["dq"][:, :, :q_length], 1, 2)
    dbias = None if bias is None else _bias_gradient(given, inputs)[:, :, : bias.shape[2], :kv_length]
    return Gradients.of(block, dq, dk, dv, dbias, found.get("dheads"))


def _with_rows(given: KernelInputs, dout: jax.Array, lse: jax.Array, delta: jax.Array) -> KernelInputs:
    """Adds dout, lse and delta to the inputs. If a query sees no key, or is padding, its lse becomes +inf: p is 0."""
    length = given.sizes.q_length
    lse = padded(jnp.where(jnp.isneginf(lse), jnp.inf, lse * LOG2_E), length, 2, jnp.inf)
    values = [lse, padded(delta, length, 2)]
    arrays = given.arrays | {
        "dout": (padded(jnp.swapaxes(dout, 1, 2), length, 2), "BNT."),
        "row_values": (jnp.stack(values, 2), "BN.T"),
    }
    return given._replace(arrays=arrays)


def _row_columns(given: KernelInputs) -> dict[str, Any]:
    """Scratch memory for lse and delta of the tile of queries that the kernel keeps, as columns."""
    return {"row_values": pltpu.VMEM((2, given.sizes.q_tile, LANES), jnp.float32)}


def _key_sums(given: KernelInputs) -> dict[str, Any]:
    """Scratch memory for `dk` and `dv` of the tile of keys that the kernel keeps, summed over its steps."""
    dims = {"dk": given.block.q.shape[-1], "dv": given.block.value_dim}
    return {name: pltpu.VMEM((given.sizes.kv_tile, dim), jnp.float32) for name, dim in dims.items()}


def _result(given: KernelInputs, name: str, by_keys: bool, axes: str | None = None, wide: bool = False) -> Operand:
    """The gradient `name` as an output: float32 if `wide` or the block is not final, else in the dtype of the inputs.

    `axes` are its letters as in `KernelInputs`, by default with a tile of tokens a step.
    """
    sizes, block = given.sizes, given.block
    batch, _, heads, head_dim = block.q.shape
    own_axes, shape = {
        "dq": ("BNT.", (batch, heads, sizes.q_length, head_dim)),
        "dk": ("BKS.", (batch, block.kv_heads, sizes.kv_length, head_dim)),
        "dv": ("BKS.", (batch, block.kv_heads, sizes.kv_length, block.value_dim)),
    }[name]
    dtype = block.q.dtype if block.final and not wide else jnp.float32
    return given.operand(jax.ShapeDtypeStruct(shape, dtype), axes or own_axes, by_keys)


def _fits_in_one_pass(given: KernelInputs, of_keys: Steps) -> bool:
    """Whether `_fused` can run: no slopes, gradients of a head fit vector memory, and the grid visits a head once."""
    block, sizes = given.block, given.sizes
    wide = [-(-dim // LANES) * LANES for dim in (block.q.shape[-1], block.value_dim)]
    floats = 2 * sizes.q_length * wide[0] + sizes.kv_length * sum(wide)
    alone = of_keys.rows == 1 or block.group == 1
    return not given.per_head_gradient and alone and 2 * 4 * floats <= VMEM_LIMIT * 3 // 4


def _fused(given: KernelInputs, of_keys: Steps, dq: jax.Array | None) -> Found:
    """Computes `dq`, `dk` and `dv` in one pass."""
    block, inputs = given.block, given.operands(by_keys=True)
    if dq is not None:
        inputs["dq"] = given.operand(dq, "BN..", by_keys=True)
    outputs = {"dq": _result(given, "dq", True, "BN..", wide=True)}
    outputs |= {name: _result(given, name, True, "BK..", wide=block.group > 1) for name in ("dk", "dv")}
    grid = Grid(block.q.shape[0], block.kv_heads, block.group, members_inside=False)
    return given.launch(backward_fused, of_keys, grid, inputs, outputs, _key_sums(given), by_keys=True, products=5)


def _keys(given: KernelInputs, of_keys: Steps) -> Found:
    """Computes `dk` and `dv` in a pass of their own; `_queries` computes `dq`."""
    grid = Grid(given.block.q.shape[0], given.block.kv_heads, given.block.group)
    inputs, outputs = given.operands(by_keys=True), {name: _result(given, name, True) for name in ("dk", "dv")}
    return given.launch(backward_keys, of_keys, grid, inputs, outputs, _key_sums(given), by_keys=True, products=4)


def _queries(given: KernelInputs, inputs: Inputs, dq: jax.Array | None) -> Found:
    """Computes `dq`, and with ALiBi also `dheads [B, N, 8, 128]`, the gradients of the slopes.

    `dheads` has partial sums: the caller sums the last two axes.
    """
    sizes = given.sizes
    batch, _, heads, head_dim = given.block.q.shape
    outputs = {"dq": _result(given, "dq", False)}
    if dq is not None:
        inputs = inputs | {"dq": given.operand(dq, "BNT.", by_keys=False)}
    if given.per_head_gradient:
        zeros = jnp.zeros((batch, heads, SUBLANES, LANES), jnp.float32)
        inputs = inputs | {"dheads": Operand(align(zeros, axes_of(given.arrays["dout"][0])))}
        outputs["dheads"] = given.operand(zeros, "BN..", by_keys=False)
    listed = steps(given.block, sizes.q_tile, sizes.kv_tile, every_own=dq is None)
    scratch = _row_columns(given) | {"acc": pltpu.VMEM((sizes.q_tile, head_dim), jnp.float32)}
    return given.launch(
        backward_queries, listed, Grid(batch, heads), inputs, outputs, scratch, by_keys=False, products=3
    )


def _bias_gradient(given: KernelInputs, inputs: Inputs) -> jax.Array:
    """Computes `dbias`, in the shape of the padded bias.

    Batch rows and heads that share a tile of the bias are the innermost loop of the grid: all add to the same output.
    """
    sizes, bias = given.sizes, given.block.bias
    assert bias is not None
    by_rows = bias.shape[2] > 1
    batch, _, heads, _ = given.block.q.shape
    of_batch, of_head = bias.shape[0] > 1 or batch == 1, bias.shape[1] > 1 or heads == 1
    shared_heads = 1 if of_head else heads
    members = shared_heads * (1 if of_batch else batch)

    def real(at: At) -> At:
        row = at.batch if of_batch else jax.lax.div(at.member, np.int32(shared_heads))
        head = at.head if of_head else jax.lax.rem(at.member, np.int32(shared_heads))
        own, visiting = (at.own, at.visiting) if by_rows else (at.visiting, at.own)
        return At(row, head, 0, own, visiting, at.bits_of_head)

    def through(index: Any) -> Any:
        return lambda at: index(real(at))

    inputs = {name: operand._replace(at=through(operand.at)) for name, operand in inputs.items()}
    zeros = jnp.zeros(bias.shape, jnp.float32)
    outputs = {"dbias": inputs["bias"]._replace(array=zeros)}
    inputs["dbias"] = Operand(align(zeros, axes_of([x for x, _ in given.arrays.values()])))
    return given.launch(
        backward_bias,
        steps(given.block, sizes.q_tile, sizes.kv_tile, by_keys=not by_rows, one_list=not of_batch),
        Grid(batch if of_batch else 1, heads if of_head else 1, members),
        inputs,
        outputs,
        _row_columns(given),
        by_keys=False,
        products=2,
        begins=lambda step: (step.at.member == 0) if by_rows else (step.at.member == 0) & step.has(FIRST),
    )["dbias"]
