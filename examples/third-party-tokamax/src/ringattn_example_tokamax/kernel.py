# SPDX-License-Identifier: Apache-2.0
"""Tokamax's Mosaic GPU attention and its backward pass, for Hopper and Blackwell, as a block kernel."""

import functools
import importlib
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir
from ringattn_core import from_flash
from ringattn_core.contract.varying import align, axes_of

TILE = 128  # arrays are padded to whole tiles, which some of tokamax's kernels read without a check
BEYOND_ALL_SCORES = 1e30
TINY = 1e-30  # in place of a scale of 0, by which tokamax would multiply the -inf of masked scores
SMALL = 2.0**-24  # the smallest positive float16, which bfloat16 has too
SIZES = ("block_q_dkv", "block_kv_dkv", "block_q_dq", "block_kv_dq")
# By architecture, the sizes that tokamax chooses for heads of 128. Smaller heads fit, too.
FORWARD = {90: {"block_q": 64}, 100: {"block_q": 128, "collective": False}}
BACKWARD = {90: dict.fromkeys(SIZES, 64), 100: dict.fromkeys(SIZES, 128)}


def architecture():
    return 10 * int(float(jax.devices("gpu")[0].compute_capability))


def why_not():
    """Why this backend cannot run here, or `None`."""
    if find_spec("tokamax") is None:
        return "tokamax is not installed: pip install 'tokamax==0.0.17'"
    kinds = {device.compute_capability for device in jax.devices("gpu")}
    fits = {int(float(kind)) for kind in kinds} in ({9}, {10})
    return None if fits else f"tokamax's kernels are for Hopper or Blackwell, not compute capability {kinds}"


def of_tokamax(name):
    """A private module of tokamax, which another version may change."""
    return importlib.import_module(f"tokamax._src.ops.attention.pallas_mosaic_gpu_{name}_sm{architecture()}")


def seeing_no_mesh(compute) -> Any:
    """`compute` as a JAX primitive, which sees no mesh; `like` has arrays with the shapes and dtypes of the results.

    Mosaic refuses arrays that vary over mesh axes. And it takes "heads" or "wg", axes of tokamax's grids, for the
    mesh axis of that name where there is one. Numbers of 64 bits are disabled too: tokamax would mix int32 and int64.
    """
    primitive, lower = Primitive(f"tokamax_{compute.__name__}"), mlir.lower_fun(compute, multiple_results=True)
    primitive.multiple_results = True

    def over_no_mesh(arrays):
        return [ShapedArray(x.shape, x.dtype) for x in arrays]

    def lowering(context, *operands, results, **static):
        plain = {name: over_no_mesh(getattr(context, name)) for name in ("avals_in", "avals_out")}
        alone = context.module_context.replace(axis_context=None)
        with jax.enable_x64(False):
            return lower(context.replace(module_context=alone, **plain), *operands, **static)

    primitive.def_abstract_eval(lambda *_, results, **static: over_no_mesh(results))
    mlir.register_lowering(primitive, lowering)

    def call(*arrays, like, **static):
        results = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like)
        return align(tuple(primitive.bind(*arrays, results=results, **static)), axes_of(arrays))

    return call


def padded(x, axis, fill=0.0):
    pads = [(0, -x.shape[i] % TILE if i == axis else 0) for i in range(x.ndim)]
    return jnp.pad(x, pads, constant_values=fill)


def ends(q, first, last, causal):
    """Tokamax's `k_start`, and `k_end`, which is not included. It has a schedule of its own for a causal mask."""
    if causal:
        return None, None
    return tuple(padded(jnp.broadcast_to(x, (len(q), *x.shape[1:])), 2) for x in (first, last + 1))


def over_rows(run, *arrays):
    """Tokamax's kernels take one row of the batch."""
    return jax.vmap(run, tuple(None if x is None else 0 for x in arrays))(*arrays)


@seeing_no_mesh
def forward_kernel(q, k, v, first, last, *, scale, causal):
    kernel, length = of_tokamax("kernel"), q.shape[1]
    options = {"logits_soft_cap": None, "use_stable_softmax": True, "rescale_threshold": 1.0, "out_dtype": q.dtype}
    sizes = {"block_kv": 128, "num_stages": 2, "persistent": not causal, **FORWARD[architecture()]}
    options |= {"normalize_output": True, "return_residuals": True, "config": kernel.Config(**sizes)}
    run = functools.partial(kernel.flash_attention_kernel, is_causal=causal, logits_scale=scale, **options)
    q, k, v = (padded(x, 1) for x in (q, k, v))
    out, (m, total) = over_rows(run, q, k, v, None, None, *ends(q, first, last, causal))
    return out[:, :length], (m + jnp.log(total))[..., :length]


@seeing_no_mesh
def backward_kernel(q, k, v, lse, dout, delta, first, last, *, scale, causal):
    kernel, lengths = of_tokamax("vjp_kernel"), (q.shape[1], k.shape[1], v.shape[1])
    options = {"logits_soft_cap": None, "ds_dtype": None, "config": kernel.Config(**BACKWARD[architecture()])}
    run = functools.partial(kernel.flash_attention_vjp_kernel, is_causal=causal, logits_scale=scale, **options)
    dout, out = cotangent_and_output_of(dout, jnp.swapaxes(delta, 1, 2)[..., None])
    lse = padded(lse, 2, BEYOND_ALL_SCORES)
    # Probabilities are exp(s - m) / l, so lse and 1 in place of m and l are those of the whole ring.
    q, k, v, out, dout = (padded(x, 1) for x in (q, k, v, out, dout))
    with jax.default_matmul_precision("highest"):
        ranges = ends(q, first, last, causal)
        *gradients, _ = over_rows(run, q, k, v, (lse, jnp.ones_like(lse)), out, dout, None, None, *ranges)
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


def forward(q, k, v, *, scale, first, last, causal=False):
    if scale < 0:  # tokamax multiplies the largest product by the scale
        return forward(-q, k, v, scale=-scale, first=first, last=last, causal=causal)
    (batch, length, heads, _), size = q.shape, v.shape[-1]
    like = jnp.empty((batch, length, heads, size), q.dtype), jnp.empty((batch, heads, length), jnp.float32)
    return forward_kernel(q, k, v, first, last, scale=scale or TINY, causal=causal, like=like)


def backward(q, k, v, out, lse, dout, *, scale, first, last, causal, delta):
    group = q.shape[2] // k.shape[2]
    if group > 1 and first.shape[1] > 1 and not causal:  # for dk and dv tokamax takes one head's range for its group
        own_k, own_v = (jnp.repeat(x, group, 2) for x in (k, v))
        options = {"scale": scale, "first": first, "last": last, "causal": causal, "delta": delta}
        dq, *of_heads = backward(q, own_k, own_v, out, lse, dout, **options)
        dk, dv = (x.reshape(*k.shape[:3], group, -1).sum(3, dtype=jnp.float32).astype(x.dtype) for x in of_heads)
        return dq, dk, dv
    sign, scale = (-1 if scale < 0 else 1), abs(scale) or TINY
    arrays = sign * q, k, v, lse, dout, delta, first, last
    dq, dk, dv = backward_kernel(*arrays, scale=scale, causal=causal, like=(q, k, v))
    return sign * dq, dk, dv


KERNEL = from_flash(forward, backward)
