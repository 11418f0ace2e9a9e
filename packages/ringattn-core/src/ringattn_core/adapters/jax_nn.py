# SPDX-License-Identifier: Apache-2.0
"""`jax.nn.dot_product_attention` over a ring: the same names, defaults and results, and the options of the ring."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from ..call.attention import ring_attention
from ..errors import BackendNotFoundError, InputError
from ..placement.arrays import as_array
from .masks import global_length, with_masks
from .options import RingOptions, adapter_names, checked, with_mesh

RENAMED: Final = {
    "attention_mask": "mask",
    "causal": "is_causal",
    "softmax_scale": "scale",
    "sliding_window": "local_window_size",
    "backend": "implementation",
    "return_lse": "return_residual",
}
"""The names that `jax.nn` has for options of `ring_attention`."""


def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K Hv"],
    bias: Float[Array, "*b n t s"] | None = None,
    mask: Bool[Array, "*b n t s"] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    local_window_size: int | tuple[int | None, int | None] | None = None,
    implementation: str | Sequence[str] | None = None,
    return_residual: bool = False,
    **ring: Unpack[RingOptions],
) -> Any:
    """Computes `jax.nn.dot_product_attention`, with equal values and gradients up to the rounding of the dtype.

    Without a ring option it runs on one device. With `axis_name` and a mesh, from `mesh=` or `jax.set_mesh`, arrays are
    global. Inside your own `jax.shard_map`, arrays are local; bias and mask then have this rank's rows and all columns,
    and sequence lengths count the whole sequence. `implementation` names a ring backend, or several to try in order.

    A query that sees no key gets the output 0 and the residual -inf; `jax.nn` gives it the mean of all values. As in
    `jax.nn`, the residual is [B, T, N] in the dtype of the key and has no gradient. `ring_attention(return_lse=True)`
    returns it in float32, with a gradient.
    """
    options = with_mesh(checked(ring, RingOptions, RENAMED), query, key, value)
    q, k, v = (_four_axes(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    batch, q_length, k_length = q.shape[0], q.shape[1], k.shape[1]
    queries = _within("query_seq_lengths", query_seq_lengths, batch, global_length(q_length, options))
    keys = _within("key_value_seq_lengths", key_value_seq_lengths, batch, global_length(k_length, options))
    added, allowed = (None if x is None else _four_axes(name, x) for name, x in (("bias", bias), ("mask", mask)))
    options = with_masks(options, (batch, q_length, k_length), added, allowed, queries, keys)
    with adapter_names(RENAMED), _explain_implementation():
        result = ring_attention(
            q, k, v, causal=is_causal, softmax_scale=scale, sliding_window=local_window_size,
            backend=implementation, return_lse=return_residual, **options,
        )  # fmt: skip
    leading = jnp.shape(query)[:-1]
    if not return_residual:
        return result.reshape(*leading, -1)
    out, lse = result
    residual = jax.lax.stop_gradient(jnp.swapaxes(lse, 1, 2).astype(k.dtype))
    return out.reshape(*leading, -1), residual.reshape(leading)


@contextlib.contextmanager
def _explain_implementation() -> Iterator[None]:
    try:
        yield
    except BackendNotFoundError as error:
        error.add_note(
            "Here implementation names a ring backend; the kernels of jax.nn, 'cudnn' too, run on one device."
        )
        raise


def _four_axes(argument: str, x: Any) -> jax.Array:
    """`x` as an array whose missing leading axes are 1; raises for more than four axes."""
    array = as_array(argument, x)
    if array.ndim > 4:
        raise InputError(argument, f"has shape {array.shape}", "It needs four axes, or fewer that broadcast")
    return array.reshape(*[1] * (4 - array.ndim), *array.shape)


def _within(argument: str, lengths: Any, batch: int, extent: int) -> jax.Array | None:
    """`lengths` as booleans `[B, extent]`: whether token `i` is within the length of its row."""
    if lengths is None:
        return None
    ends = as_array(argument, lengths)
    if ends.shape != (batch,) or not jnp.issubdtype(ends.dtype, jnp.integer):
        raise InputError(
            argument, f"has shape {ends.shape} and dtype {ends.dtype}", f"It needs integers of shape ({batch},)"
        )
    return jnp.arange(extent, dtype=jnp.int32)[None] < ends.astype(jnp.int32)[:, None]
