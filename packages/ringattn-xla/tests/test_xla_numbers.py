# SPDX-License-Identifier: Apache-2.0
"""Promises on numbers: the kernel agrees with the dense float64 computation, forward and in every gradient."""

from typing import Any

import dense_block as dense
import jax.numpy as jnp
import numpy as np
import pytest
from dense_block import make_block
from ringattn_core.contract.merge import empty
from ringattn_core.contract.protocol import Block
from ringattn_core.masks import Numpy
from ringattn_xla.block import KERNEL

FORWARD = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 2e-2}
GRADIENT = {"float32": 5e-5, "float16": 5e-3, "bfloat16": 2.5e-2}


def _ids(batch: int, length: int) -> np.ndarray:
    """Documents that differ by batch row, with padding at the end."""
    ids = np.sort(np.random.default_rng(length).integers(0, 3, (batch, length)), -1)
    ids[:, length - length // 5 :] = -1
    return ids.astype(np.int32)


def _dense_mask(batch: int, heads: int, length: int, keys: int) -> np.ndarray:
    return np.random.default_rng(3).random((batch, heads, length, keys)) < 0.6


def _masks(length: int, keys: int) -> dict[str, Any]:
    masks = tuple(Numpy(_dense_mask(1, 2, length, keys)[0, n]) for n in range(2))
    return {"masks": masks, "mask_of_head": (1, 0, 0, 1)}


def _bias(*shape: int) -> np.ndarray:
    return np.random.default_rng(4).normal(size=shape).astype(np.float32)


OPTIONS: dict[str, Any] = {
    "plain": lambda t, s: {},
    "causal": lambda t, s: {"causal": True},
    "window": lambda t, s: {"window": (5, 2)},
    "one-sided window": lambda t, s: {"window": (None, 3)},
    "chunk": lambda t, s: {"chunk": 6},
    "segments": lambda t, s: {"q_segments": _ids(2, t), "kv_segments": _ids(2, s)},
    "causal segments": lambda t, s: {"q_segments": _ids(2, t), "kv_segments": _ids(2, s), "causal": True},
    "masks of heads": _masks,
    "dense mask": lambda t, s: {"mask": _dense_mask(2, 1, t, s)},
    "dense mask of heads": lambda t, s: {"mask": _dense_mask(1, 4, t, s)},
    "soft cap": lambda t, s: {"soft_cap": 1.5, "causal": True},
    "scale": lambda t, s: {"scale": 0.9},
    "bias": lambda t, s: {"bias": _bias(2, 4, t, s)},
    "bias of keys": lambda t, s: {"bias": _bias(1, 1, 1, s), "soft_cap": 2.0},
    "bias of heads": lambda t, s: {"bias": _bias(1, 4, t, s), "causal": True},
    "slopes": lambda t, s: {"slopes": np.array([[0.5, 0.1, 0.02, 0.3]], np.float32), "causal": True},
    "slopes of rows": lambda t, s: {"slopes": np.array([[0.5, 0.1, 0.02, 0.3], [0.2] * 4], np.float32)},
    "dropout": lambda t, s: {"dropout": 0.3, "seed": np.array([5, 2**32 - 1], np.uint32), "causal": True},
    "positions": lambda t, s: {
        "causal": True,
        "increasing": False,
        "q_positions": np.random.default_rng(5).integers(-4, t, (2, t)).astype(np.int32),
        "kv_positions": np.random.default_rng(6).integers(-4, s, (2, s)).astype(np.int32),
    },
    "all at once": lambda t, s: {
        "causal": True, "window": (40, None), "soft_cap": 3.0, "bias": _bias(2, 4, t, s), "dropout": 0.2,
        "seed": np.array([1, 2], np.uint32), "slopes": np.array([[0.01, 0.02, 0.03, 0.04]], np.float32),
        "q_segments": _ids(2, t), "kv_segments": _ids(2, s),
    },
}  # fmt: skip


def check(block: Block, case: str) -> None:
    """Forward and every gradient of the block, with gradients through both the output and the lse."""
    dtype = str(block.q.dtype)
    out, lse = dense.forward(block)
    got = KERNEL.forward(block, empty(block))
    _near(f"{case}: out", got.out, out, FORWARD[dtype])
    _near(f"{case}: lse", np.nan_to_num(got.lse, neginf=0), np.nan_to_num(lse, neginf=0), FORWARD[dtype])
    np.testing.assert_array_equal(np.isneginf(got.lse), np.isneginf(lse))
    draw = np.random.default_rng(9)
    seen = np.isfinite(lse)
    dout = draw.normal(size=out.shape) * np.swapaxes(seen, 1, 2)[..., None]
    dout = dense.f64(jnp.asarray(dout, block.q.dtype))
    delta = np.swapaxes((dout * out).sum(-1), 1, 2) - draw.normal(size=lse.shape) * seen
    dq = draw.normal(size=block.q.shape)
    wanted = dense.backward(block, dout, lse, delta)
    wanted["dq"] = wanted["dq"] + dq
    arrays = [jnp.asarray(x, jnp.float32) for x in (dout, lse, delta, dq)]
    grads = KERNEL.backward(block, arrays[0].astype(block.q.dtype), *arrays[1:])
    for name, want in wanted.items():
        value = getattr(grads, name)
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
    block = make_block(2, q_length, kv_length, heads=4, kv_heads=2, tile=tile, **fields)
    check(block, f"{option} {lengths}")


@pytest.mark.parametrize("lengths", [(1, 1), (1, 9), (9, 1)], ids=str)
def test_a_single_query_or_key_is_enough(lengths: tuple[int, int]) -> None:
    check(make_block(2, *lengths, heads=4, kv_heads=2, **OPTIONS["all at once"](*lengths)), str(lengths))


@pytest.mark.parametrize("option", ["causal", "segments", "all at once"])
def test_a_prime_length_is_padded_and_cut(option: str) -> None:
    check(make_block(2, 521, 521, heads=4, kv_heads=2, tile=128, **OPTIONS[option](521, 521)), option)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("option", ["causal", "bias", "dropout"])
def test_half_precision_stays_within_its_tolerance(option: str, dtype: Any) -> None:
    check(make_block(2, 64, 96, heads=4, kv_heads=2, dim=32, dtype=dtype, tile=32, **OPTIONS[option](64, 96)), option)


@pytest.mark.parametrize("heads", [(4, 4), (4, 1), (6, 3)], ids=str)
@pytest.mark.parametrize("value_dim", [8, 5, 24])
def test_any_grouping_of_heads_and_any_value_size(heads: tuple[int, int], value_dim: int) -> None:
    block = make_block(1, 24, 40, heads=heads[0], kv_heads=heads[1], value_dim=value_dim, tile=8, causal=True)
    check(block, f"{heads} {value_dim}")
