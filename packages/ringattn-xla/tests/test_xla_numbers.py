# SPDX-License-Identifier: Apache-2.0
"""Promises on numbers: the kernel agrees with the float64 oracle, forward and in every gradient."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from block_problem import problem_of
from ringattn_conformance.blocks import make_block, random_ids, random_mask
from ringattn_conformance.oracle import attend
from ringattn_core.contract.protocol import Block
from ringattn_core.masks import Numpy
from ringattn_xla.block import KERNEL

FORWARD = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}
GRADIENT = {"float32": 5e-5, "float16": 5e-3, "bfloat16": 2.5e-2}


def _masks(length: int, keys: int) -> dict[str, Any]:
    masks = tuple(Numpy(random_mask(1, 2, length, keys)[0, n]) for n in range(2))
    return {"masks": masks, "mask_of_head": (1, 0, 0, 1)}


def tiles(length: int | None) -> dict[str, Any]:
    return {"q_blocksize": length, "kv_blocksize": length}


def _bias(*shape: int) -> np.ndarray:
    return np.random.default_rng(4).normal(size=shape).astype(np.float32)


OPTIONS: dict[str, Any] = {
    "plain": lambda t, s: {},
    "causal": lambda t, s: {"causal": True},
    "window": lambda t, s: {"window": (5, 2)},
    "one-sided window": lambda t, s: {"window": (None, 3)},
    "chunk": lambda t, s: {"chunk": 6},
    "segments": lambda t, s: {"q_segments": random_ids(2, t), "kv_segments": random_ids(2, s)},
    "causal segments": lambda t, s: {"q_segments": random_ids(2, t), "kv_segments": random_ids(2, s), "causal": True},
    "masks of heads": _masks,
    "dense mask": lambda t, s: {"mask": random_mask(2, 1, t, s)},
    "dense mask of heads": lambda t, s: {"mask": random_mask(1, 4, t, s)},
    "soft cap": lambda t, s: {"soft_cap": 1.5, "causal": True},
    "scale": lambda t, s: {"scale": 0.9},
    "bias": lambda t, s: {"bias": _bias(2, 4, t, s)},
    "bias of keys": lambda t, s: {"bias": _bias(1, 1, 1, s), "soft_cap": 2.0},
    "bias of heads": lambda t, s: {"bias": _bias(1, 4, t, s), "causal": True},
    "slopes": lambda t, s: {"slopes": np.array([[0.5, 0.1, 0.02, 0.3]], np.float32), "causal": True},
    "dropout": lambda t, s: {"dropout": 0.3, "seed": np.array([2**32 - 1] * 2, np.uint32), "causal": True},
    "positions": lambda t, s: {
        "causal": True,
        "increasing": False,
        "q_positions": np.random.default_rng(5).integers(-4, t, (2, t)).astype(np.int32),
        "kv_positions": np.random.default_rng(6).integers(-4, s, (2, s)).astype(np.int32),
    },
    "all at once": lambda t, s: {
        "causal": True, "window": (40, None), "soft_cap": 3.0, "bias": _bias(2, 4, t, s), "dropout": 0.2,
        "seed": np.array([2, 2], np.uint32), "slopes": np.array([[0.01, 0.02, 0.03, 0.04]], np.float32),
        "q_segments": random_ids(2, t), "kv_segments": random_ids(2, s),
    },
}  # fmt: skip


def check(block: Block, case: str) -> None:
    """Forward and every gradient of the block, with gradients through both the output and the lse."""
    dtype, problem = str(block.q.dtype), problem_of(block)
    draw = np.random.default_rng(9)
    dout = np.asarray(jnp.asarray(draw.normal(size=(*block.q.shape[:3], block.value_dim)), dtype))
    out, lse = (getattr(attend(problem), name) for name in ("out", "lse"))
    dout = dout * np.swapaxes(np.isfinite(lse), 1, 2)[..., None].astype(dout.dtype)
    dlse = draw.normal(size=lse.shape) * np.isfinite(lse)
    wanted = attend(problem, dout, dlse).gradients
    got = KERNEL.forward(block, None)
    _near(f"{case}: out", got.out, out, FORWARD[dtype])
    _near(f"{case}: lse", np.nan_to_num(got.lse, neginf=0), np.nan_to_num(lse, neginf=0), FORWARD[dtype])
    np.testing.assert_array_equal(np.isneginf(got.lse), np.isneginf(lse))
    delta = np.swapaxes((dout.astype(np.float64) * out).sum(-1), 1, 2) - dlse
    dq = draw.normal(size=block.q.shape)
    arrays = [jnp.asarray(x, jnp.float32) for x in (lse, delta, dq)]
    grads = KERNEL.backward(block, jnp.asarray(dout), *arrays)
    for name, want in wanted.items():
        value = getattr(grads, name)
        want = want[None] if name == "dslopes" else want + (dq if name == "dq" else 0)
        assert value.dtype == jnp.float32 and value.shape == want.shape, (case, name, value.dtype, value.shape)
        _near(f"{case}: {name}", value, want, GRADIENT[dtype] * max(0.1, np.abs(want).max()))


def _near(what: str, got: Any, want: np.ndarray, tolerance: float) -> None:
    wrong = np.abs(np.asarray(got, np.float64) - want)
    worst = np.unravel_index(np.argmax(np.where(np.isnan(wrong), np.inf, wrong)), wrong.shape)
    assert wrong[worst] <= tolerance, f"{what} is off by {wrong[worst]:.3g} > {tolerance:.3g} at {worst}"


@pytest.mark.parametrize("lengths", [(7, 7, None), (64, 96, 16)], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_is_exact_in_one_tile_and_in_many(option: str, lengths: tuple[int, int, int | None]) -> None:
    q_length, kv_length, tile = lengths
    fields = OPTIONS[option](q_length, kv_length)
    block = make_block(2, q_length, kv_length, heads=4, kv_heads=2, params=tiles(tile), **fields)
    check(block, f"{option} {lengths}")


@pytest.mark.parametrize("option", ["causal", "segments", "all at once"])
def test_a_prime_length_is_padded_and_cut(option: str) -> None:
    check(make_block(2, 521, 521, heads=4, kv_heads=2, params=tiles(128), **OPTIONS[option](521, 521)), option)


@pytest.mark.parametrize("option", ["slopes", "all at once"])
def test_the_gradient_of_slopes_in_half_precision_is_as_exact_as_in_float32(option: str) -> None:
    """The rest of its error in a call is that of `delta`, which comes from the rounded output: `docs/numerics.md`."""
    block = make_block(2, 41, 53, heads=4, kv_heads=2, dtype=jnp.bfloat16, **OPTIONS[option](41, 53))
    draw, lse = np.random.default_rng(9), KERNEL.forward(block, None).lse
    dout = jnp.asarray(draw.normal(size=block.q.shape), jnp.bfloat16)
    delta = jnp.asarray(draw.normal(size=lse.shape), jnp.float32)
    wide = dataclasses.replace(block, q=block.q.astype(jnp.float32), kv=block.kv.astype(jnp.float32))
    got = KERNEL.backward(block, dout, lse, delta, None).dslopes
    want = np.asarray(KERNEL.backward(wide, dout.astype(jnp.float32), lse, delta, None).dslopes)
    _near("dslopes", got, want, GRADIENT["float32"] * np.abs(want).max())


def test_slopes_of_each_batch_row_are_its_own() -> None:
    slopes = np.array([[0.5, 0.1, 0.02, 0.3], [0.2] * 4], np.float32)
    both = KERNEL.forward(make_block(2, 20, 30, heads=4, params=tiles(8), slopes=slopes), None)
    for row in range(2):
        one = KERNEL.forward(make_block(2, 20, 30, heads=4, params=tiles(8), slopes=slopes[row : row + 1]), None)
        np.testing.assert_array_equal(one.out[row], both.out[row])
