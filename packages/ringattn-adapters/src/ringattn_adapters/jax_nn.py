# SPDX-License-Identifier: Apache-2.0
"""`jax.nn.dot_product_attention` over a ring: the same names, defaults and results, and options for the ring."""

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int
from ringattn_core import ring_attention
from ringattn_core.errors import BackendNotFoundError, InputError

from .masks import with_masks
from .options import as_array, checked, errors_in_terms_of, integers

RENAMED: Final = {
    "attention_mask": "mask",
    "causal": "is_causal",
    "softmax_scale": "scale",
    "sliding_window": "local_window_size",
    "backend": "implementation",
    "return_lse": "return_residual",
}
"""Options of `ring_attention`, with the names that `jax.nn` has for them."""


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
    **ring: Any,
) -> Any:
    """Computes `jax.nn.dot_product_attention`, with equal values and gradients up to the rounding of the dtype.

    It also takes the options of `ring_attention` that `jax.nn` lacks. Without `axis_name` it runs on one
    device. With `axis_name` and a mesh, from `mesh=` or `jax.set_mesh`, arrays are global. Inside your own
    `jax.shard_map`, arrays are local; bias and mask then have this rank's rows and all columns, and sequence lengths
    count the whole sequence. `implementation` names a ring backend, or several to try in order.

    A query that sees no key gets the output 0 and the residual -inf; in `jax.nn` its output is the mean of all values.
    As in `jax.nn`, the residual is [B, T, N] in the dtype of the key and has no gradient.
    `ring_attention(return_lse=True)` returns the log-sum-exp in float32, with a gradient.
    """
    options = checked(ring, RENAMED)
    q, k, v = (_four_axes(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    lengths = (
        _lengths("query_seq_lengths", query_seq_lengths, q),
        _lengths("key_value_seq_lengths", key_value_seq_lengths, k),
    )
    added, allowed = (None if x is None else _four_axes(name, x) for name, x in (("bias", bias), ("mask", mask)))
    options = with_masks(options, q, k, added, allowed, lengths)
    try:
        with errors_in_terms_of(RENAMED):
            result = ring_attention(
                q, k, v, causal=is_causal, softmax_scale=scale, sliding_window=local_window_size,
                backend=implementation, return_lse=return_residual, **options,
            )  # fmt: skip
    except BackendNotFoundError as error:
        error.add_note(
            "Here implementation names a ring backend; the kernels of jax.nn, 'cudnn' too, run on one device."
        )
        raise
    leading = jnp.shape(query)[:-1]
    if not return_residual:
        return result.reshape(*leading, -1)
    out, lse = result
    residual = jax.lax.stop_gradient(jnp.swapaxes(lse, 1, 2).astype(k.dtype))
    return out.reshape(*leading, -1), residual.reshape(leading)


def _four_axes(argument: str, x: Any) -> jax.Array:
    """`x` as an array whose missing leading axes are 1; raises for more than four axes."""
    array = as_array(argument, x)
    if array.ndim > 4:
        raise InputError(argument, f"has shape {array.shape}", "It needs four axes, or fewer that broadcast")
    return array.reshape(*[1] * (4 - array.ndim), *array.shape)


def _lengths(argument: str, lengths: Any, x: jax.Array) -> jax.Array | None:
    """The lengths as int32, one for each batch row of `x`."""
    return None if lengths is None else integers(argument, lengths, x.shape[:1])
