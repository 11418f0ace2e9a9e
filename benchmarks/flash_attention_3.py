# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3's kernels, for comparison, from the wheel `dew-flash-attn-cu13`, which has them for JAX.

Only `libdew_flash_attn3.so` of the wheel is needed; `FLASH_ATTENTION_3` names the file.
"""

import ctypes
import functools
import os
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

VARIABLE = "FLASH_ATTENTION_3"
_TARGETS = ("dew_flash3_mha_fwd", "dew_flash3_mha_bwd", "dew_flash3_mha_varlen_fwd", "dew_flash3_mha_varlen_bwd")


def installed() -> bool:
    """Whether the environment names the library."""
    return VARIABLE in os.environ


@functools.cache
def _register() -> None:
    library = ctypes.cdll.LoadLibrary(os.environ[VARIABLE])
    for name in _TARGETS:
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(getattr(library, name)), platform="CUDA")


def _attributes(head_dim: int, causal: bool, window: tuple[int, int]) -> dict[str, object]:
    return {
        "softmax_scale": np.float64(head_dim**-0.5),
        "is_causal": causal,
        "window_size_left": np.int64(window[0]),
        "window_size_right": np.int64(window[1]),
    }


def forward(
    q: jax.Array, k: jax.Array, v: jax.Array, causal: bool = False, window: tuple[int, int] = (-1, -1),
    starts: jax.Array | None = None, longest: int = 0,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """Output and log-sum-exp `[B, N, T]`. With `starts`, one batch row holds several packed documents."""
    _register()
    batch, length, heads, dim = q.shape
    one = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32)
    split = jax.ShapeDtypeStruct((1, 1, 1), jnp.float32)
    attributes = _attributes(dim, causal, window)
    if starts is None:
        results = (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((batch, heads, length), jnp.float32))
        out, lse, _, _ = jax.ffi.ffi_call("dew_flash3_mha_fwd", (*results, one, split))(q, k, v, **attributes)
        return out, lse
    results = (jax.ShapeDtypeStruct(q.shape[1:], q.dtype), jax.ShapeDtypeStruct((heads, length), jnp.float32))
    out, lse, _, _ = jax.ffi.ffi_call("dew_flash3_mha_varlen_fwd", (*results, one, split))(
        q[0], k[0], v[0], starts, starts, max_seqlen=np.int64(longest), max_seqlen_k=np.int64(longest), **attributes
    )
    return out[None], lse[None]


def backward(
    arrays: Sequence[jax.Array], causal: bool = False, window: tuple[int, int] = (-1, -1),
    starts: jax.Array | None = None, longest: int = 0,
) -> tuple[jax.Array, ...]:  # fmt: skip
    """`dq, dk, dv` from `(dout, q, k, v, out, lse)`."""
    _register()
    dout, q, k, v, out, lse = arrays
    batch, length, heads, dim = q.shape
    attributes = _attributes(dim, causal, window)
    sequences = batch if starts is None else starts.shape[0] - 1
    scratch = jax.ShapeDtypeStruct((heads * (batch * length + 128 * (sequences + 1)),), jnp.float32)
    cut = (lambda x: x) if starts is None else (lambda x: x[0])
    dout, q, k, v, out, lse = map(cut, (dout, q, k, v, out, lse))
    results = (*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)), scratch, scratch)
    if starts is None:
        return tuple(jax.ffi.ffi_call("dew_flash3_mha_bwd", results)(dout, q, k, v, out, lse, **attributes)[:3])
    found = jax.ffi.ffi_call("dew_flash3_mha_varlen_bwd", results)(
        dout, q, k, v, out, lse, starts, starts, max_seqlen=np.int64(longest), max_seqlen_k=np.int64(longest),
        **attributes,
    )  # fmt: skip
    return tuple(x[None] for x in found[:3])
