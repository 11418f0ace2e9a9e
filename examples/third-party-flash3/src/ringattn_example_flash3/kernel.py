# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3, through the foreign functions of the wheel `dew-flash-attn-cu13`, as a block kernel."""

import ctypes
import functools
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from ringattn_core import from_flash


def library() -> Path | None:
    found = find_spec("dew_flash_attn")
    return Path(found.origin).with_name("libdew_flash_attn3.so") if found and found.origin else None


def why_not() -> str | None:
    """Why this backend cannot run here, or `None`."""
    if library() is None:
        return "FlashAttention-3 is not installed: pip install dew-flash-attn-cu13"
    kinds = {getattr(device, "compute_capability", "none") for device in jax.devices()}
    return None if kinds == {"9.0"} else f"FlashAttention-3 is compiled for compute capability 9.0, not {kinds}"


@functools.cache
def register() -> None:
    functions = ctypes.cdll.LoadLibrary(str(library()))
    for name in ("dew_flash3_mha_fwd", "dew_flash3_mha_bwd"):
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(functions, name)), platform="CUDA")


def call(name, results, *arrays, scale, causal):
    register()
    window = {"window_size_left": np.int64(-1), "window_size_right": np.int64(-1)}
    return jax.ffi.ffi_call(name, results)(*arrays, softmax_scale=np.float64(scale), is_causal=causal, **window)


def padded(x):
    """The kernels take head sizes that 8 divides."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -x.shape[-1] % 8)))


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def forward(q, k, v, *, scale, causal):
    size, (q, k, v) = q.shape[-1], map(padded, (q, k, v))
    batch, length, heads, _ = q.shape
    results = (
        jax.ShapeDtypeStruct(q.shape, q.dtype),
        floats(batch, heads, length),
        floats(1, 1, 1, 1),
        floats(1, 1, 1),
    )
    out, lse, *_ = call("dew_flash3_mha_fwd", results, q, k, v, scale=scale, causal=causal)
    return out[..., :size], lse


def backward(q, k, v, out, lse, dout, *, scale, causal):
    size, (q, k, v, out, dout) = q.shape[-1], map(padded, (q, k, v, out, dout))
    batch, length, heads, _ = q.shape
    scratch = floats(heads * (batch * length + 128 * (batch + 1)))
    results = (*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)), scratch, scratch)
    found = call("dew_flash3_mha_bwd", results, dout, q, k, v, out, lse, scale=scale, causal=causal)
    return tuple(x[..., :size] for x in found[:3])


KERNEL = from_flash(forward, backward)
