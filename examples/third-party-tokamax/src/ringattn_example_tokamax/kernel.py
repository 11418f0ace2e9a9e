# SPDX-License-Identifier: Apache-2.0
"""Tokamax's Mosaic GPU attention and its backward pass, for Hopper and Blackwell, as a block kernel."""

import functools
import importlib
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from ringattn_core import from_flash

TILE = 128
"""Arrays are padded to a multiple of this many tokens: some of tokamax's kernels read whole tiles without a check."""
BEYOND_ALL_SCORES = 1e30
TINY = 1e-30
"""In place of a scale of 0, by which tokamax would multiply the `-inf` of masked scores."""
SMALL = 2.0**-24
"""The smallest positive float16, which bfloat16 has too."""
FORWARD = {
    90: {"block_q": 64, "block_kv": 128, "num_stages": 2},
    100: {"block_q": 128, "block_kv": 128, "num_stages": 2, "collective": False},
}
"""The sizes that tokamax chooses for heads of 128, which also fit smaller heads."""
SIZES = ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
BACKWARD = {90: dict.fromkeys(SIZES, 64), 100: dict.fromkeys(SIZES, 128)}


def architecture() -> int:
    """90 on Hopper, 100 on Blackwell."""
    return 10 * int(float(jax.devices("gpu")[0].compute_capability))


def why_not() -> str | None:
    """Why this backend cannot run here, or `None`."""
    if find_spec("tokamax") is None:
        return "tokamax is not installed: pip install 'tokamax==0.0.17'"
    kinds = {device.compute_capability for device in jax.devices("gpu")}
    fits = {int(float(kind)) for kind in kinds} in ({9}, {10})
    return None if fits else f"tokamax's kernels are for Hopper or Blackwell, not compute capability {kinds}"


def of_tokamax(name: str) -> ModuleType:
    """A private module of tokamax, which another version may change."""
    return importlib.import_module(f"tokamax._src.ops.attention.pallas_mosaic_gpu_{name}_sm{architecture()}")


def padded(x: jax.Array, axis: int, fill: float = 0) -> jax.Array:
    pads = [(0, -x.shape[i] % TILE if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, pads, constant_values=fill)


def ends(first: Any, last: Any, q: jax.Array, causal: bool) -> tuple[Any, Any]:
    """Tokamax's `k_start`, and `k_end`, which is not included. It has a schedule of its own for a causal mask."""
    if causal:
        return None, None
    shape = (q.shape[0], *first.shape[1:])
    return tuple(padded(jnp.broadcast_to(x, shape), 2) for x in (first, last + 1))


def over_rows(run: Any, *arrays: Any) -> Any:
    """Tokamax's kernels take one row of the batch."""
    return jax.vmap(run, tuple(None if x is None else 0 for x in arrays))(*arrays)


def forward(q, k, v, *, scale, first, last, causal):
    if scale < 0:  # tokamax multiplies the largest product by the scale
        q, scale = -q, -scale
    scale = scale or TINY
    kernel, length = of_tokamax("kernel"), q.shape[1]
    run = functools.partial(
        kernel.flash_attention_kernel,
        is_causal=causal,
        logits_soft_cap=None,
        logits_scale=scale,
        out_dtype=q.dtype,
        normalize_output=True,
        return_residuals=True,
        use_stable_softmax=True,
        rescale_threshold=1.0,
        config=kernel.Config(**FORWARD[architecture()], persistent=not causal),
    )
    q, k, v = (padded(x, 1) for x in (q, k, v))
    out, (m, total) = over_rows(run, q, k, v, None, None, *ends(first, last, q, causal))
    return out[:, :length], (m + jnp.log(total))[..., :length]


def backward(q, k, v, out, lse, dout, *, scale, first, last, causal, delta):
    if scale < 0:
        options = {"first": first, "last": last, "causal": causal, "delta": delta}
        dq, dk, dv = backward(-q, k, v, out, lse, dout, scale=-scale, **options)
        return -dq, dk, dv
    scale = scale or TINY
    kernel, lengths = of_tokamax("vjp_kernel"), (q.shape[1], k.shape[1], v.shape[1])
    run = functools.partial(
        kernel.flash_attention_vjp_kernel,
        logits_scale=scale,
        logits_soft_cap=None,
        is_causal=causal,
        ds_dtype=None,
        config=kernel.Config(**BACKWARD[architecture()]),
    )
    dout, out = cotangent_and_output_of(dout, jnp.swapaxes(delta, 1, 2)[..., None])
    lse = padded(lse, 2, BEYOND_ALL_SCORES)
    # Probabilities are exp(s - m) / l, so lse and 1 in place of m and l are those of the whole ring.
    residuals = lse, jnp.ones_like(lse)
    arrays = *(padded(x, 1) for x in (q, k, v)), residuals, padded(out, 1), padded(dout, 1)
    with jax.default_matmul_precision("highest"):
        *gradients, _ = over_rows(run, *arrays, None, None, *ends(first, last, q, causal))
    return tuple(x[:, :length] for x, length in zip(gradients, lengths, strict=True))


def cotangent_and_output_of(dout, delta):
    """`dout`, and an output with which `Σ dout * out` is `delta`.

    Tokamax computes that sum itself, and uses the output for nothing else. So the cotangent of `lse`, which `delta`
    contains, needs no kernel of its own. If `dout` is 0 and `delta` is not, one entry of `dout` becomes `SMALL`.
    """
    column = jnp.argmax(jnp.abs(dout), -1, keepdims=True)
    there = jax.lax.broadcasted_iota(jnp.int32, dout.shape, 3) == column
    value = jnp.take_along_axis(dout, column, -1)
    value = jnp.where((value == 0) & (delta != 0), SMALL, value)
    out = jnp.where(there & (value != 0), delta / jnp.where(value == 0, 1, value).astype(jnp.float32), 0)
    return jnp.where(there, value, dout), out


KERNEL = from_flash(forward, backward)
