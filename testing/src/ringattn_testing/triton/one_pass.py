# SPDX-License-Identifier: Apache-2.0
"""The one-pass backward kernel for Hopper, called on a block and launched."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import ringattn_xla.block
from ringattn_core.contract.protocol import Block, Gradients
from ringattn_triton.block_kernel import KERNEL
from ringattn_triton.hopper import backward as one_pass
from ringattn_triton.launch.target import compiling_for

from ringattn_testing.triton.compile_budgets import SHARED, allowed
from ringattn_testing.triton.compile_reports import Report, launches, of_lowered
from ringattn_testing.triton.given_blocks import TOLERANCE

HALF = jnp.bfloat16
Rows = tuple[jax.Array, jax.Array, jax.Array]


def prepared(block: Block) -> Rows:
    """`dout`, the final `lse`, and `delta` of a block that is the whole of attention."""
    return _rows(block, _dout(block))


def _dout(block: Block) -> jax.Array:
    shape = *block.q.shape[:3], block.value_dim
    return jnp.asarray(np.random.default_rng(1).normal(size=shape), block.q.dtype)


@jax.jit
def _rows(block: Block, dout: jax.Array) -> Rows:
    done = ringattn_xla.block.KERNEL.forward(block, None)
    return dout, done.lse, jnp.swapaxes((dout.astype(jnp.float32) * done.out).sum(-1), 1, 2)


@jax.jit
def _by_xla(block: Block, dout: jax.Array) -> tuple[Rows, Gradients]:
    rows = _rows(block, dout)
    return rows, ringattn_xla.block.KERNEL.backward(block, *rows, None)


def gradients(block: Block, *rows: jax.Array, dq: jax.Array | None = None) -> Gradients:
    """What the kernel computes; traced anew at each call, because tests change what it is traced from."""
    return jax.jit(lambda *x: one_pass.backward(*x))(block, *rows, dq)


def computed(block: Block, ordered: bool = True) -> Gradients:
    """What the kernel computes, if the XLA backend agrees."""
    rule = dataclasses.replace(block.rule, fused_backward=not ordered)
    block = dataclasses.replace(block, rule=rule)
    rows, want = _by_xla(block, _dout(block))
    got = gradients(block, *rows)
    names = [x.name for x in dataclasses.fields(want) if getattr(want, x.name) is not None]
    for name in names:
        found, right = (np.asarray(getattr(x, name), np.float64) for x in (got, want))
        wrong = np.linalg.norm(found - right) / np.linalg.norm(right)
        assert wrong <= TOLERANCE[str(block.q.dtype)] / 4, f"{name} is off by {wrong:.3g} of its norm"
    return got


def launched(block: Block) -> list[str]:
    """The names of the kernels of a block's backward pass on Hopper."""
    rows = jax.ShapeDtypeStruct((block.q.shape[0], block.q.shape[2], block.q.shape[1]), jnp.float32)
    with compiling_for(90):
        program = jax.make_jaxpr(lambda *x: KERNEL.backward(*x))(block, block.q, rows, rows, None)
    return [call.name for call, _ in launches(program.jaxpr)]


def within_budget(block: Block, beside: str) -> dict[str, Report]:
    """A report on each kernel of a block's backward pass, if the main one fits and spills no more than its budget."""
    batch, length, heads, dim = block.q.shape
    rows = jnp.zeros((batch, heads, length))
    with compiling_for(90):
        program = jax.jit(lambda *x: one_pass.backward(*x, None)).trace(block, block.q, rows, rows)
        found = {x.name: x for x in of_lowered(program.lower(lowering_platforms=("cuda",)))}
    report = found["ringattn_hopper_backward"]
    bound, reason = allowed(str(block.q.dtype), dim, report.name + beside, 90)
    assert report.spilled <= bound, f"{report}; the budget is {bound}: {reason}"
    assert report.shared <= SHARED[90] * 1024 and report.matrix == "wgmma" and not report.serialized, report
    return found
