# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-3's kernels, for comparison, from either wheel that has them for JAX.

`dew-flash-attn-cu13` has documents too; of it only `libdew_flash_attn3.so` is needed, and `FLASH_ATTENTION_3` may name
that file. `flash-attn3-jax` is taken where the other is not installed.
"""

import ctypes
import functools
import importlib.util
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from workloads import Workload

VARIABLE: Final = "FLASH_ATTENTION_3"
_LIBRARY: Final = "libdew_flash_attn3.so"
_TARGETS: Final = ("dew_flash3_mha_fwd", "dew_flash3_mha_bwd", "dew_flash3_mha_varlen_fwd", "dew_flash3_mha_varlen_bwd")


def why_not(case: Workload) -> str | None:
    """Why FlashAttention-3 cannot take part in a case here, or `None` where it can."""
    if library() is not None:
        # Given values of 128 with keys of 192, the library writes past its results.
        return "its library takes no values of another head size" if case.shape.value_size else None
    if importlib.util.find_spec("flash_attn3_jax") is None:
        return f"FlashAttention-3 is not installed, and {VARIABLE} names no library"
    return "the wheel flash-attn3-jax takes no such call" if case.documents or case.sinks else None


def attend(case: Workload) -> Any:
    """The case as a differentiable function of query, key, value, and sinks where it has them."""
    if library() is not None:
        return functools.partial(_attend, case)
    from flash_attn3_jax import flash_mha  # pyright: ignore[reportMissingImports]

    return functools.partial(flash_mha, is_causal=case.causal, window_size=case.window or (-1, -1))


def library() -> str | None:
    """The library of the wheel `dew-flash-attn-cu13`, if it is here."""
    found = importlib.util.find_spec("dew_flash_attn")
    folder = None if found is None or found.origin is None else Path(found.origin).parent
    return os.environ.get(VARIABLE) or (None if folder is None else str(folder / _LIBRARY))


@functools.cache
def _register() -> None:
    path = library()
    assert path is not None
    for name in _TARGETS:
        target = getattr(ctypes.cdll.LoadLibrary(path), name)
        jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(target), platform="CUDA")


def _attributes(case: Workload) -> dict[str, Any]:
    left, right = case.window or (-1, -1)
    found: dict[str, Any] = {
        "softmax_scale": np.float64(case.shape.head_size**-0.5),
        "is_causal": case.causal,
        "window_size_left": np.int64(left),
        "window_size_right": np.int64(right),
    }
    longest = np.int64(max(case.documents, default=0))
    return found | ({"max_seqlen": longest, "max_seqlen_k": longest} if case.documents else {})


def _starts(case: Workload) -> tuple[jax.Array, ...]:
    """Where documents start, of queries and of keys; nothing without documents."""
    starts = jnp.asarray([0, *itertools.accumulate(case.documents)], jnp.int32)
    return (starts, starts) if case.documents else ()


def forward(case: Workload, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output and log-sum-exp `[B, N, T]`, without sinks. The documents of a case lie in one batch row."""
    _register()
    batch, length, heads, _ = q.shape
    shape, rows, target = (*q.shape[:3], v.shape[3]), (batch, heads, length), "dew_flash3_mha_fwd"
    if case.documents:
        q, k, v = q[0], k[0], v[0]
        target = "dew_flash3_mha_varlen_fwd"
    scratch = (jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32), jax.ShapeDtypeStruct((1, 1, 1), jnp.float32))
    results = (jax.ShapeDtypeStruct(shape[-q.ndim :], q.dtype), jax.ShapeDtypeStruct(rows[-q.ndim + 1 :], jnp.float32))
    found = jax.ffi.ffi_call(target, (*results, *scratch))(q, k, v, *_starts(case), **_attributes(case))
    return found[0].reshape(shape), found[1].reshape(rows)


def backward(case: Workload, arrays: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """`dq, dk, dv` from `(dout, q, k, v, out, lse)`."""
    _register()
    batch, length, heads, _ = arrays[1].shape
    shapes = [x.shape for x in arrays[1:4]]
    target, sequences = "dew_flash3_mha_bwd", batch
    if case.documents:
        arrays = [x[0] for x in arrays]
        target, sequences = "dew_flash3_mha_varlen_bwd", len(case.documents)
    scratch = jax.ShapeDtypeStruct((heads * (batch * length + 128 * (sequences + 1)),), jnp.float32)
    results = (*(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays[1:4]), scratch, scratch)
    found = jax.ffi.ffi_call(target, results)(*arrays, *_starts(case), **_attributes(case))
    return tuple(x.reshape(shape) for x, shape in zip(found[:3], shapes, strict=True))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(case: Workload, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
    return _kept(case, q, k, v, sinks)[0]


def _kept(case: Workload, q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None) -> Any:
    """The output, and what the backward pass needs. A sink adds to the divisor of a row, and nothing to its values."""
    out, lse = forward(case, q, k, v)
    if sinks is not None:
        summed = jnp.logaddexp(lse, sinks[None, :, None])
        share = jnp.swapaxes(jnp.exp(lse - summed), 1, 2)[..., None]
        out, lse = (out.astype(jnp.float32) * share).astype(out.dtype), summed
    return out, (q, k, v, out, lse, sinks)


def _pulled_back(case: Workload, kept: Any, dout: jax.Array) -> tuple[jax.Array | None, ...]:
    q, k, v, out, lse, sinks = kept
    dsinks = None
    if sinks is not None:
        delta = jnp.swapaxes((dout.astype(jnp.float32) * out.astype(jnp.float32)).sum(-1), 1, 2)
        dsinks = -(jnp.exp(sinks[None, :, None] - lse) * delta).sum((0, 2))
    return (*backward(case, (dout, q, k, v, out, lse)), dsinks)


_attend.defvjp(_kept, _pulled_back)
