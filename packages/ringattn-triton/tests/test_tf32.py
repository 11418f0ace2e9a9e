# SPDX-License-Identifier: Apache-2.0
"""Products of float32 with `precision="default"` are those of numbers rounded to nearest, not cut, to TF32."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from ringattn_core.contract.protocol import Block, Partial
from ringattn_testing.triton.given_blocks import make_block
from ringattn_testing.triton.interpreting import interpret
from ringattn_triton import kernel_inputs
from ringattn_triton.block_kernel import KERNEL
from ringattn_triton.few_queries import family as few_queries
from ringattn_triton.kernel_inputs import nearest_tf32
from ringattn_triton.kernels.scores import as_operand
from ringattn_triton.launch.target import target

SIZES: dict[str, dict[str, Any]] = {
    "portable": {"t": 70, "s": 61},
    "few queries": {"t": 4, "s": 200, "tiles": (16, 16)},
}
"""Sizes of a block that a family of kernels takes."""


def block_of(family: str, precision: str | None = "default") -> Block:
    """A block with scores of about 100 and positive values: if operands are cut, all results are too small."""
    sizes = dict(SIZES[family])
    block = make_block(2, sizes.pop("t"), sizes.pop("s"), dim=64, **sizes)
    assert (few_queries.why_not_forward(block, target()) is None) == (family == "few queries")
    key, value = block.kv
    return dataclasses.replace(
        block, q=100 * block.q, kv=(key, jnp.abs(value)), rule=dataclasses.replace(block.rule, precision=precision)
    )


def relative(got: jax.Array, want: jax.Array) -> np.ndarray:
    """The signed error of each element as a share of the element: below 0 where it is too near to zero."""
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return (got - want) / want


def forward(block: Block) -> Partial:
    return KERNEL.forward(block, None)


@pytest.mark.parametrize("family", SIZES)
def test_large_scores_are_not_too_small(family: str) -> None:
    error = relative(forward(block_of(family)).lse, forward(block_of(family, None)).lse)
    assert np.abs(error).max() > 2**-15, "these products are exact"
    assert abs(error.mean()) < 2**-14


def of_small_scores(family: str) -> tuple[Block, Block]:
    """A block of TF32 products whose inputs are TF32 numbers, and the same with exact products."""
    block = block_of(family)
    rule = dataclasses.replace(block.rule, softmax_scale=1e-3)
    q, *kv = (nearest_tf32(x, rule) for x in (block.q, *block.kv))
    block = dataclasses.replace(block, q=q, kv=tuple(kv), rule=rule)
    return block, dataclasses.replace(block, rule=dataclasses.replace(rule, precision=None))


@pytest.mark.parametrize("family", SIZES)
def test_weights_of_values_are_not_too_small(family: str) -> None:
    """The inputs need no rounding, so what is left is that of weights."""
    block, exact = of_small_scores(family)
    error = relative(forward(block).out, forward(exact).out)
    assert 2**-18 < np.abs(error).max() < 2**-11 and abs(error.mean()) < 2**-15


def test_gradients_of_values_are_not_too_small() -> None:
    """Their terms are weights times positive numbers of `dout`: if these were cut, all would be too small."""
    block, exact = of_small_scores("portable")
    dout = jax.random.uniform(jax.random.key(3), (*block.q.shape[:3], block.value_dim), minval=1.0, maxval=2.0)
    lse = forward(exact).lse
    got, want = (KERNEL.backward(one, dout, lse, jnp.zeros_like(lse), None).dv for one in (block, exact))
    error = relative(got, want)
    assert np.abs(error).max() > 2**-18 and abs(error.mean()) < 2**-14


@triton.jit
def _rounded_in_a_kernel(X, OUT, F: tl.constexpr):
    i = tl.arange(0, 16)
    x = tl.load(X + i)
    tl.store(OUT + i, as_operand(x, x, F))


def test_a_kernel_rounds_all_but_ties_as_xla_does_and_both_keep_what_is_not_finite() -> None:
    of_a_gpu = np.array([0x7FFFFFFF, 0xFFFFFFFF], np.uint32).view(np.float32)  # adding to these bits would overflow
    finite = [0.0, 1.0, 1 + 2.0**-12, 1 + 3 * 2.0**-12, -1 - 3 * 2.0**-12, 2 - 2.0**-20, 1e-30, -3e38]
    x = np.array([*of_a_gpu, np.nan, np.inf, -np.inf, *finite, 0.0, 0.0, 0.0], np.float32)
    block = block_of("portable")
    constants = kernel_inputs.of_block(block).constants
    by_xla = np.asarray(jax.jit(nearest_tf32, static_argnums=1)(x, block.rule))
    (in_kernel,) = interpret(_rounded_in_a_kernel, [x], [((16,), np.float32)], F=constants)
    np.testing.assert_array_equal(in_kernel, by_xla)
    np.testing.assert_array_equal(by_xla[:5], x[:5])
    np.testing.assert_array_equal(by_xla[5:11], [0.0, 1.0, 1.0, 1 + 2.0**-10, -1 - 2.0**-10, 2.0])


@pytest.mark.parametrize(
    ("dtype", "precision"), [("float32", None), ("float32", "high"), ("float32", "highest"), ("bfloat16", "default")]
)
def test_operands_of_other_products_are_not_rounded(dtype: str, precision: str | None) -> None:
    x = jnp.ones(3, dtype)
    assert nearest_tf32(x, block_of("portable", precision).rule) is x
