# SPDX-License-Identifier: Apache-2.0
"""A module like `equinox.nn.MultiheadAttention`, over a ring, with or without a batch axis."""

import numbers
from collections.abc import Callable
from typing import Any, Final

import equinox as eqx
import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray
from ringattn_core import ring_attention
from ringattn_core.errors import InputError

from .options import OPTIONS, as_array, checked, drawn, dropout_options, dtype_of, errors_in_terms_of, integers

RENAMED: Final = {"attention_mask": "mask", "dropout_prob": "dropout_p", "dropout_seed": "key"}
"""Options of `ring_attention` that the module sets itself, with the names of Equinox's arguments for them."""
ARRAYS: Final = (
    "softmax_aux", "q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions", "kv_range", "query_offset",
    "alibi_slopes",
)  # fmt: skip
"""The options of `ring_attention` that are arrays. The module's call takes these, its constructor all others."""
SETTINGS: Final = tuple(name for name in OPTIONS if name not in ARRAYS)


class RingMultiheadAttention(eqx.Module):
    """Multi-head attention with projections, exact, over the ring that its settings name.

    Parameters have the names, the shapes and, from the same key, the values of `equinox.nn.MultiheadAttention`, and
    the output is the same. Three things are added: inputs may have a leading batch axis (with a `mesh` use it instead
    of `vmap`, so that the mesh can split it), `num_key_heads` may be fewer than `num_heads`, and the module takes every
    option of `ring_attention`. Pass options that are arrays to the call, and all others to the constructor. A query
    that sees no key gets 0 from each head.
    """

    query_proj: eqx.nn.Linear
    key_proj: eqx.nn.Linear
    value_proj: eqx.nn.Linear
    output_proj: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    num_heads: int = eqx.field(static=True)
    num_key_heads: int = eqx.field(static=True)
    settings: tuple[tuple[str, Any], ...] = eqx.field(static=True)

    def __init__(
        self,
        num_heads: int,
        query_size: int,
        key_size: int | None = None,
        value_size: int | None = None,
        output_size: int | None = None,
        qk_size: int | None = None,
        vo_size: int | None = None,
        use_query_bias: bool = False,
        use_key_bias: bool = False,
        use_value_bias: bool = False,
        use_output_bias: bool = False,
        dropout_p: float = 0.0,
        inference: bool = False,
        dtype: Any = None,
        *,
        num_key_heads: int | None = None,
        key: PRNGKeyArray,
        **settings: Any,
    ):
        num_heads, query_size = _size("num_heads", num_heads), _size("query_size", query_size)
        key_size, value_size = _size("key_size", key_size, query_size), _size("value_size", value_size, query_size)
        output_size = _size("output_size", output_size, query_size)
        if query_size < num_heads and None in (qk_size, vo_size):
            fact = f"got {num_heads} for a query_size of {query_size}"
            raise InputError("num_heads", fact, "Pass fewer heads, or both qk_size and vo_size")
        qk_size = _size("qk_size", qk_size, query_size // num_heads)
        vo_size = _size("vo_size", vo_size, query_size // num_heads)
        self.num_heads, self.num_key_heads = num_heads, _size("num_key_heads", num_key_heads, num_heads)
        if num_heads % self.num_key_heads:
            raise InputError(
                "num_key_heads",
                f"got {num_key_heads} for {num_heads} heads",
                "Query heads share key heads in equal groups",
            )
        self.settings = _fixed(checked(settings, RENAMED, SETTINGS))
        keys = drawn("key", key, lambda key: jax.random.split(key, 4))
        dtype = None if dtype is None else dtype_of("dtype", dtype)
        sizes = (
            (query_size, num_heads * qk_size, use_query_bias),
            (key_size, self.num_key_heads * qk_size, use_key_bias),
            (value_size, self.num_key_heads * vo_size, use_value_bias),
            (num_heads * vo_size, output_size, use_output_bias),
        )
        self.query_proj, self.key_proj, self.value_proj, self.output_proj = (
            eqx.nn.Linear(features, out, use_bias=bias, dtype=dtype, key=one)
            for (features, out, bias), one in zip(sizes, keys, strict=True)
        )
        self.dropout = eqx.nn.Dropout(dropout_p, inference=inference)

    def __call__(
        self,
        query: Float[Array, "*B T q_size"],
        key_: Float[Array, "*B S k_size"],
        value: Float[Array, "*B S v_size"],
        mask: Bool[Array, "*n T S_global"] | None = None,
        *,
        key: PRNGKeyArray | None = None,
        inference: bool | None = None,
        process_heads: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None,
        **arrays: Any,
    ) -> Float[Array, "*B T o_size"]:
        """Attends as in Equinox, with or without a batch axis; `process_heads` gets [*B, length, heads, head size].

        A mask is [T, S], [N, T, S] or [B, N, T, S], true where a query sees a key; B and N may be 1.
        """
        inputs = {name: x for name, x in checked(arrays, RENAMED, ARRAYS).items() if x is not None}
        named = {"query": query, "key_": key_, "value": value}
        query, key_, value = (as_array(name, x) for name, x in named.items())
        batched = query.ndim == 3
        if query.ndim not in (2, 3) or key_.ndim != query.ndim or value.ndim != query.ndim:
            shapes = f"{query.shape}, {key_.shape} and {value.shape}"
            raise InputError(
                "query, key_ and value",
                f"have shapes {shapes}",
                "Their axes are (length, size) or (batch, length, size)",
            )
        q = _heads("query", query, self.query_proj, self.num_heads)
        k = _heads("key_", key_, self.key_proj, self.num_key_heads)
        v = _heads("value", value, self.value_proj, self.num_key_heads)
        if process_heads is not None:
            q, k, v = _three_arrays(process_heads(q, k, v) if callable(process_heads) else None)
        if not batched:
            q, k, v = (x[None] for x in (q, k, v))
            for name, x in (("q_segment_ids", q), ("kv_segment_ids", k)):
                if name in inputs:
                    inputs[name] = integers(name, inputs[name], x.shape[1:2])[None]
        inference = self.dropout.inference if inference is None else inference
        inputs |= dropout_options(("dropout_p", self.dropout.p), ("inference", inference), ("key", key))
        allowed = None if mask is None else as_array("mask", mask)
        allowed = None if allowed is None else allowed.reshape(*[1] * (4 - allowed.ndim), *allowed.shape)
        with errors_in_terms_of(RENAMED):
            out = ring_attention(q, k, v, attention_mask=allowed, **dict(self.settings), **inputs)
        out = out.reshape(*out.shape[:2], -1)
        return _each(self.output_proj, out if batched else out[0])


def _size(argument: str, x: Any, default: int | None = None) -> int:
    """`x` as a Python integer, or the default if `x` is `None`; raises unless it is an integer of 1 or more."""
    x = default if x is None else x
    if isinstance(x, bool) or not isinstance(x, numbers.Integral) or x < 1:
        raise InputError(argument, f"got {x!r}", "It needs an integer of 1 or more")
    return int(x)


def _heads(argument: str, x: jax.Array, projection: eqx.nn.Linear, heads: int) -> jax.Array:
    """Projects every token and cuts the result into heads, `[..., heads, head size]`."""
    if x.shape[-1] != projection.in_features:
        raise InputError(
            argument, f"has shape {x.shape}", f"Its last axis must be the {projection.in_features} of the layer"
        )
    return _each(projection, x).reshape(*x.shape[:-1], heads, -1)


def _three_arrays(result: Any) -> tuple[jax.Array, ...]:
    """The query, key and value heads that `process_heads` returned, as arrays; raises unless they are three."""
    try:
        found = tuple(result)
    except TypeError:
        found = ()
    if len(found) != 3:
        raise InputError(
            "process_heads", "does not turn query, key and value heads into three arrays", "Pass a function that does"
        )
    return tuple(as_array("process_heads", x) for x in found)


def _each(projection: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Applies the projection to every token. Axes are not flattened, so that a mesh can split each of them."""
    for _ in x.shape[:-1]:
        projection = jax.vmap(projection)
    return projection(x)


def _fixed(settings: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """The settings as a sorted, hashable tuple, because JAX hashes and compares the static fields of a module."""
    for name, value in settings.items():
        try:
            hash(value)
        except TypeError:
            raise InputError(
                name, f"is a {type(value).__name__}, which cannot be hashed", "Pass a tuple, or a RingAttentionConfig"
            ) from None
    return tuple(sorted(settings.items()))
