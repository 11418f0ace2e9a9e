# SPDX-License-Identifier: Apache-2.0
"""An `attention_fn` for the attention layers of Flax, in Linen and in NNX.

Linen silently drops arguments that a function does not name. So this function names all of them, and raises for an
argument that it does not support. This module does not import Flax.
"""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from ringattn_core import ring_attention
from ringattn_core.errors import InputError

from .masks import with_masks
from .options import as_array, checked, dropout_options, dtype_of, errors_in_terms_of, refuse

RENAMED: Final = {"attention_mask": "mask", "dropout_prob": "dropout_rate", "dropout_seed": "dropout_rng"}
"""Options of `ring_attention` that Flax's layers pass, with Flax's names for them."""

NAMES: Final = ("query", "key", "value")


def ring_attention_fn(**options: Any) -> Callable[..., jax.Array]:
    """Makes an `attention_fn` for `nn.MultiHeadDotProductAttention` and `nnx.MultiHeadAttention`.

    The options are those of `ring_attention`. Attention is causal with the option `causal=True`, or if the layer passes
    `is_causal`. Key heads may be fewer than query heads, and there may be any number of leading batch axes. A mask that
    is equal for all heads and queries takes memory proportional to the length. Any other mask that Flax passes takes
    memory proportional to the length squared, also a causal mask: use `causal=True` instead. The layer's key
    seeds dropout, but ringattn's random bits differ from Flax's.
    """
    settings = checked(options, RENAMED)

    def attention_fn(
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        bias: jax.Array | None = None,
        mask: jax.Array | None = None,
        broadcast_dropout: bool = True,
        dropout_rng: jax.Array | None = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        promote_dtype: Any = None,
        is_causal: bool = False,
    ) -> jax.Array:
        """Attention over arrays [*batch, length, heads, head size], with the arguments of Flax's own function."""
        weights = {"module (sow_weights=True)": module, "einsum_dot_general": einsum_dot_general}
        weights |= {"qk_attn_weights_einsum": qk_attn_weights_einsum}
        weights |= {"attn_weights_value_einsum": attn_weights_value_einsum}
        refuse(weights, "It needs the attention weights, which a ring never holds: use Flax's own function")
        given = tuple(as_array(name, x) for name, x in zip(NAMES, (query, key, value), strict=True))
        q, k, v = _promoted(given, dtype, promote_dtype)
        batch = _batch_axes(q, k, v)
        q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
        call = dict(settings)
        call["causal"] = is_causal or (False if settings.get("causal") is None else settings["causal"])
        if call.get("precision") is None:
            call["precision"] = precision
        _refuse_decoding(call, q.shape[1], k.shape[1])
        call |= dropout_options(
            ("dropout_rate", dropout_rate), ("deterministic", deterministic), ("dropout_rng", dropout_rng)
        )
        if "dropout_prob" in call and broadcast_dropout:
            raise InputError(
                "broadcast_dropout",
                "is True, but here every head and example drops different entries",
                "Pass broadcast_dropout=False to the layer",
            )
        added = None if bias is None else _with_one_batch_axis("bias", as_array("bias", bias), batch)
        allowed = None if mask is None else _with_one_batch_axis("mask", as_array("mask", mask), batch).astype(bool)
        call = with_masks(call, q, k, added, allowed)
        with errors_in_terms_of(RENAMED):
            out = ring_attention(q, k, v, **call)
        # The softmax is float32 in any case. With this flag Flax also returns a float32 output.
        out = out.astype(jnp.float32) if force_fp32_for_softmax else out
        return out.reshape(*batch, *out.shape[1:])

    return attention_fn


def _promoted(arrays: tuple[jax.Array, ...], dtype: Any, promote: Any) -> tuple[jax.Array, ...]:
    """Query, key and value in one dtype: `dtype`, or their promoted dtype. `promote` is Flax's `promote_dtype`."""
    if promote is None:
        wanted = jnp.result_type(*arrays) if dtype is None else dtype_of("dtype", dtype)
        return tuple(x.astype(wanted) for x in arrays)
    fact = "does not turn the tuple (query, key, value) into three arrays"
    try:
        promoted = tuple(promote(arrays, dtype=dtype))
    except (TypeError, ValueError) as error:
        promoted, fact = (), f"raised {type(error).__name__}: {error}"
    if len(promoted) != len(arrays):
        raise InputError(
            "promote_dtype",
            fact,
            "Pass a function of a tuple, like that of flax.nnx; the function of Linen takes its arrays one by one",
        )
    return tuple(as_array("promote_dtype", x) for x in promoted)


def _batch_axes(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[int, ...]:
    """The sizes of the leading batch axes; raises unless query, key and value have the same sizes."""
    for name, x in zip(NAMES, (q, k, v), strict=True):
        if x.ndim < 3:
            raise InputError(name, f"has shape {x.shape}", "Its axes are (*batch, length, heads, head size)")
        if x.shape[:-3] != q.shape[:-3]:
            raise InputError(
                name, f"has batch axes {x.shape[:-3]} but query has {q.shape[:-3]}", "Each axis must be equal"
            )
    return q.shape[:-3]


def _refuse_decoding(options: dict[str, Any], queries: int, keys: int) -> None:
    """Refuses a decoding step (one query, many keys) with masks by position: Flax passes no position of the query."""
    by_position = ["causal"] if options["causal"] is not False else []
    by_position += [name for name in ("sliding_window", "chunk_size") if options.get(name) is not None]
    placed = any(options.get(name) is not None for name in ("q_positions", "query_offset"))
    if queries == 1 < keys and by_position and not placed:
        raise InputError(
            by_position[0],
            f"compares positions, but Flax passes none for one query against {keys} keys, a decoding step",
            "Decode with Flax's own attention_fn, whose parameters are the same",
        )


def _with_one_batch_axis(argument: str, x: jax.Array, batch: tuple[int, ...]) -> jax.Array:
    """A bias or mask that broadcasts to [*batch, N, T, S], with all batch axes flattened to one."""
    array = x.reshape(*[1] * (len(batch) + 3 - x.ndim), *x.shape)
    own = array.shape[:-3]
    if len(own) > len(batch) or any(n not in (1, full) for n, full in zip(own, batch, strict=True)):
        raise InputError(argument, f"has shape {x.shape}", f"It must broadcast to (*{batch}, heads, queries, keys)")
    if any(n != 1 for n in own):
        array = jnp.broadcast_to(array, (*batch, *array.shape[-3:]))
    return array.reshape(-1, *array.shape[-3:])
