# SPDX-License-Identifier: Apache-2.0
"""Promises on the gradient of the bias: right whatever shares the bias, kept strip by strip, and for those who ask."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.contract.protocol import Block
from ringattn_testing.triton.compile_reports import launches
from ringattn_testing.triton.given_blocks import after_bias_sums, bias, make_block, near, with_option
from ringattn_testing.triton.gradients import backward, check, given_to
from ringattn_triton.block_kernel import KERNEL
from ringattn_triton.portable import bias_gradient

SHAPES = [(1, 1, 1), (2, 1, 40), (1, 4, 40), (2, 4, 1)]


@pytest.fixture
def short_strips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Strips of one tile of queries each, however few programs that makes."""
    monkeypatch.setattr(bias_gradient, "PROGRAMS_PER_STRIP", 1)
    monkeypatch.setattr(bias_gradient, "MOST_STRIPS", 99)


def launched(block: Block, *given: Any) -> list[str]:
    """The names of the kernels of the gradients."""
    program = jax.make_jaxpr(KERNEL.backward)(block, *given)
    return [call.name for call, _ in launches(program.jaxpr)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_right_in_strips_of_one_tile(shape: tuple[int, int, int], short_strips: None) -> None:
    block = with_option("segments", 40, 36, tiles=(16, 16), bias=bias(*shape, 36))
    assert launched(block, *given_to(block)).count("ringattn_bias_sums") == 3
    check(block, str(shape))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_strips_change_no_bit_of_any_gradient(dtype: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    block = make_block(2, 70, 50, heads=4, dim=16, dtype=dtype, causal=True, bias=bias(1, 1, 70, 50))
    given = given_to(block)
    whole = backward(KERNEL, block, *given)
    monkeypatch.setattr(bias_gradient, "PROGRAMS_PER_STRIP", 16)
    monkeypatch.setattr(bias_gradient, "MOST_STRIPS", 99)
    jax.clear_caches()
    strips = backward(KERNEL, block, *given)
    assert launched(block, *given).count("ringattn_bias_sums") == 2
    for name, x in whole.items():
        np.testing.assert_array_equal(strips[name], x, name)


def test_no_strip_is_kept_before_the_one_before_it_is_summed(short_strips: None) -> None:
    """What is kept of two strips would be in memory at once."""
    block = with_option("bias", 96, 36)
    (call,) = jax.make_jaxpr(KERNEL.backward)(block, *given_to(block)).eqns
    assert after_bias_sums(call.params["jaxpr"], "ringattn_backward_queries") == [False, True, True]


def test_where_nothing_is_continued_it_is_right_in_strips_too(short_strips: None) -> None:
    block = make_block(2, 70, 50, heads=4, dim=16, dtype=jnp.bfloat16, causal=True)
    dout, lse, delta, dq = given_to(block)
    for shape in ((1, 1, 70), (2, 4, 1)):
        added = dataclasses.replace(block, bias=jnp.asarray(bias(*shape, 50), jnp.bfloat16))
        alone = dataclasses.replace(added, final=True)
        final = KERNEL.backward(alone, dout.astype(jnp.bfloat16), lse, delta, None)
        assert {x.dtype.name for x in jax.tree.leaves(final)} == {"bfloat16"}
        want = KERNEL.backward(added, dout.astype(jnp.bfloat16), lse, delta, jnp.zeros_like(dq))
        for name, x in backward_names(want).items():
            near(f"{shape}: {name}", getattr(final, name), x, 2**-8 * float(jnp.abs(x).max()))


def backward_names(found: Any) -> dict[str, jax.Array]:
    return {field.name: x for field in dataclasses.fields(found) if (x := getattr(found, field.name)) is not None}


def test_nothing_is_kept_for_a_bias_that_nobody_differentiates_by() -> None:
    block = with_option("bias", 40, 36)
    given = given_to(block)
    fixed = dataclasses.replace(block, bias_fixed=True)
    assert "ringattn_bias_sums" in launched(block, *given) and "ringattn_bias_sums" not in launched(fixed, *given)
    outputs = [
        [output.shape for output in call.outputs]
        for call, _ in launches(jax.make_jaxpr(KERNEL.backward)(fixed, *given).jaxpr)
        if call.name == "ringattn_backward_queries"
    ]
    assert outputs == [[block.q.shape, (1,), (1,)]]
    with_it, without = backward(KERNEL, block, *given), backward(KERNEL, fixed, *given)
    assert with_it.keys() - without.keys() == {"dbias"}
    for name, x in without.items():
        np.testing.assert_array_equal(with_it[name], x, name)
