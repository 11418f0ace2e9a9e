# SPDX-License-Identifier: Apache-2.0
"""A kernel is one operation of a JAX program, interpreted on a CPU and compiled for a TPU."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.contract.protocol import Partial
from ringattn_testing.tpu.blocks import make_block
from ringattn_tpu.block import KERNEL
from ringattn_xla.block import KERNEL as XLA

BLOCK = make_block(1, 128, 128, causal=True)


def test_one_traced_program_is_interpreted_here_and_compiled_for_a_tpu():
    traced = jax.jit(lambda block: KERNEL.forward(block, None)).trace(BLOCK)
    lowered = traced.lower()
    np.testing.assert_allclose(lowered.compile()(BLOCK).out, XLA.forward(BLOCK, None).out, atol=2e-5)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" in text and 'kernel_name = "ringattn_forward"' in text
    assert "tpu_custom_call" not in lowered.as_text()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_no_step_of_the_interpreter_computes_a_whole_array(dtype: jnp.dtype):
    """Unless `launch` works round benchmarks/upstream/pallas_interpreter_copies.py, each step copies all inputs."""
    block = make_block(2, 256, 256, heads=6, kv_heads=3, dim=48, dtype=dtype, causal=True, final=True)
    text = jax.jit(lambda block: KERNEL.forward(block, None)).lower(block).compile().as_text()
    body = text[text.index("\n%" + re.findall(r"while\(.*body=%?([\w.]+)", text)[-1] + " (") :].split("\n}")[0]
    computed = re.findall(r"= \w+\[([\d,]+)\]\S* (?:copy|fusion|convert)\(", body)
    whole = [shape for shape in computed if np.prod([int(size) for size in shape.split(",")]) >= block.q.size // 2]
    assert computed and whole == ["2,6,256,48"], whole  # of the results: what the step writes


@pytest.mark.parametrize("out", [True, False])
def test_a_partial_result_is_continued_in_place_on_a_tpu(out: bool):
    """A partial result without `out`, of sinks, has only the state of the softmax."""
    partial = XLA.forward(BLOCK, None)
    partial = partial if out else Partial(None, partial.lse)
    text = jax.jit(KERNEL.forward).trace(BLOCK, partial).lower(lowering_platforms=("tpu",)).as_text()
    (line,) = [line for line in text.splitlines() if "@tpu_custom_call" in line]
    assert line.count("output_operand_alias<") == 1 + out
