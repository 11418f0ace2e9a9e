# SPDX-License-Identifier: Apache-2.0
"""Where queries choose blocks, the heads of a group are rows of one head: results are those of the block as it was."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ringattn_xla.block
from ringattn_core.contract.protocol import Block, Partial
from ringattn_testing.triton.compile_reports import launches
from ringattn_testing.triton.given_blocks import chosen, make_block
from ringattn_testing.triton.one_pass import HALF, prepared
from ringattn_triton import grouped_rows
from ringattn_triton.block_kernel import _backward, _forward
from ringattn_triton.hopper import turn_order
from ringattn_triton.launch.target import Target, target

HOPPER = Target("cuda", 90)
TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-2}


def groups_of_8(length: int, keys: int, groups: int, size: int, **fields: Any) -> Block:
    """A block in which 8 query heads read each of two key heads, with such choices."""
    options = chosen(groups, size, 2, **{"causal": True, **fields})(length, keys)
    return make_block(2, length, keys, heads=16, kv_heads=2, **options)


BLOCKS = {
    "key heads differ": lambda: groups_of_8(37, 150, 2, 32, dim=16),
    "one choice for all heads": lambda: groups_of_8(40, 130, 1, 64, dim=16, causal=False, sliding_window=(60, 9)),
    "documents": lambda: groups_of_8(
        40, 40, 2, 16, dim=16, q_segments=np.repeat([[0, 1, 2, -1]], 10, 1).repeat(2, 0).astype(np.int32),
        kv_segments=np.repeat([[0, 1, 2, -1]], 10, 1).repeat(2, 0).astype(np.int32),
    ),
    "largest scores": lambda: groups_of_8(40, 70, 2, 16, dim=16, return_max_logits=True),
}  # fmt: skip


def agree(block: Block, where: Target, partial: Partial | None = None) -> None:
    """Results and gradients are those of the XLA backend."""
    assert grouped_rows.grouped(block)
    rows = prepared(block)
    dq = jnp.ones(block.q.shape, jnp.float32)
    xla = ringattn_xla.block.KERNEL

    @jax.jit
    def got_and_want(block: Block, partial: Partial | None, *given: jax.Array) -> Any:
        got = _forward.__wrapped__(block, partial, where), _backward.__wrapped__(block, *given, where)
        return got, (xla.forward(block, partial), xla.backward(block, *given))

    for a, b in zip(*got_and_want(block, partial, *rows, dq), strict=True):
        for field in dataclasses.fields(b):
            found, right = getattr(a, field.name), getattr(b, field.name)
            assert (found is None) == (right is None)
            if right is not None:
                assert found.shape == right.shape, field.name
                finite = np.where(np.isfinite(right), right, 0.0)
                tolerance = TOLERANCE[str(block.q.dtype)] * max(1.0, float(np.abs(finite).max()))
                np.testing.assert_allclose(found, right, rtol=0, atol=tolerance, err_msg=field.name)


@pytest.mark.parametrize("name", BLOCKS)
def test_rows_of_groups_give_the_results_of_heads(name: str) -> None:
    block = BLOCKS[name]()
    agree(block, target())
    if not block.rule.return_max_logits:
        agree(block, target(), ringattn_xla.block.KERNEL.forward(block, None))


def launched(function: Any, *given: Any) -> list[str]:
    return [call.name for call, _ in launches(jax.make_jaxpr(function)(*given).jaxpr)]


@pytest.mark.parametrize("size", [16, 64])
def test_the_kernels_for_hopper_take_rows_of_groups(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_order, "enough_heads", lambda *_: True)  # a test cannot have long blocks
    block = groups_of_8(40, 260, 2, size, dim=128, dtype=HALF)
    rows = prepared(block)
    names = launched(lambda b: _forward.__wrapped__(b, None, HOPPER), block)
    names += launched(lambda b, *x: _backward.__wrapped__(b, *x, None, HOPPER), block, *rows)
    assert {"ringattn_hopper_forward", "ringattn_hopper_backward"} <= {*names}
    agree(block, HOPPER)


def test_a_tile_of_rows_visits_what_its_few_queries_chose() -> None:
    block = groups_of_8(64, 2048, 2, 128, dim=16, causal=False)
    few, share = grouped_rows.query_of_each_row(grouped_rows.as_rows(block))
    assert share == 8 and few.q_length == 64
    assert few.bits is not None and block.bits is not None and few.bits.shape == block.bits.shape
