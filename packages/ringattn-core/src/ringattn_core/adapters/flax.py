# SPDX-License-Identifier: Apache-2.0
"""What an `attention_fn` of Flax is here, for Linen and for NNX: one function that either calls.

It imports nothing of Flax. Linen passes only the arguments that a function names, so this one names them all: what
it cannot do it refuses, and nothing is dropped on the way.
"""

from collections.abc import Callable
from typing import Any, Final, Unpack

import jax
import jax.numpy as jnp

from ..call.attention import ring_attention
from ..errors import InputError
from .options import AttentionOptions, known, told_as
from .padding import hidden, of_keys, spread, whole
from .seeds import seed

RENAMED: Final = {"attention_mask": "mask", "dropout_prob": "dropout_rate", "dropout_seed": "dropout_rng"}
"""What Flax calls the options of `ring_attention` that it passes itself."""


def ring_attention_fn(**options: Unpack[AttentionOptions]) -> Callable[..., jax.Array]:
    """An `attention_fn` for `nn.MultiHeadDotProductAttention` and `nnx.MultiHeadAttention`.

    The options are those of `ring_attention`. It is causal where `causal=True` is among them or the layer says
    `is_causal`. Key heads may be fewer than query heads, and leading batch axes as many as there are. A mask that
    differs by key alone takes no memory of the square of the length; a causal one passed by Flax does, `causal=True`
    does not. Dropout follows the key that the layer passes, by ringattn's own bits.
    """
    settings = known(options, AttentionOptions, RENAMED)

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
        force_fp32_for_softmax: bool = False,  # the softmax is float32 in any case
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        promote_dtype: Any = None,
        is_causal: bool = False,
    ) -> jax.Array:
        """Attention of [*batch, length, heads, head size], the arguments being those of Flax's own."""
        _nothing_of(
            {
                "module (sow_weights=True)": module,
                "einsum_dot_general": einsum_dot_general,
                "qk_attn_weights_einsum": qk_attn_weights_einsum,
                "attn_weights_value_einsum": attn_weights_value_einsum,
            }
        )
        q, k, v = _promoted((query, key, value), dtype, promote_dtype)
        batch = q.shape[:-3]
        q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in (q, k, v))
        chosen = dict(settings)
        chosen["causal"] = bool(settings.get("causal")) or is_causal
        if chosen.get("precision") is None:
            chosen["precision"] = precision
        _no_decoding(chosen, q.shape[1], k.shape[1])
        sinks = chosen.pop("softmax_aux", None)
        if dropout_rate and not deterministic:
            if broadcast_dropout:
                raise InputError(
                    "broadcast_dropout",
                    "is True, but every head and example drops entries of its own here",
                    "Pass broadcast_dropout=False to the layer",
                )
            chosen |= {"dropout_prob": dropout_rate, "dropout_seed": seed("dropout_rng", dropout_rng, dropout_rate)}
        columns = whole(k.shape[1], chosen)
        added = None if bias is None else spread(_of_batch(bias, batch), None, columns)
        allowed = None if mask is None else _of_batch(mask, batch).astype(bool)
        shape = (q.shape[0], q.shape[1], k.shape[1])
        if allowed is not None and of_keys(allowed, (*shape[:2], columns)):
            chosen, allowed = hidden(chosen, shape, None, allowed[:, 0, 0]), None
        if allowed is not None:
            allowed = spread(allowed, q.shape[1], columns)
        with told_as(RENAMED):
            out = ring_attention(q, k, v, sinks, added, attention_mask=allowed, **chosen)
        return out.reshape(*batch, *out.shape[1:])

    return attention_fn


def _nothing_of(refused: dict[str, Any]) -> None:
    for argument, given in refused.items():
        if given is not None:
            raise InputError(
                argument, "needs the attention weights, which a ring never holds", "Leave it out, or use Flax's own"
            )


def _promoted(arrays: tuple[jax.Array, ...], dtype: Any, promote: Any) -> tuple[jax.Array, ...]:
    """Query, key and value in one dtype: the one given, or the one that they promote to."""
    if promote is not None:
        return promote(arrays, dtype=dtype)
    return tuple(x.astype(jnp.result_type(*arrays) if dtype is None else dtype) for x in arrays)


def _no_decoding(options: dict[str, Any], queries: int, keys: int) -> None:
    """Refuses one query against a cache under a mask by position: Flax does not say at which position it is."""
    by_position = [name for name in ("causal", "sliding_window", "chunk_size") if options.get(name)]
    if queries == 1 < keys and by_position and options.get("q_positions") is None:
        raise InputError(
            by_position[0],
            f"compares positions, but one query against {keys} keys is a step of decoding",
            "Decode with Flax's own attention_fn, whose parameters are the same",
        )


def _of_batch(x: Any, batch: tuple[int, ...]) -> jax.Array:
    """A bias or mask that broadcasts to [*batch, N, T, S], with one batch axis in place of all."""
    array = jnp.asarray(x)
    array = array.reshape(*[1] * (len(batch) + 3 - array.ndim), *array.shape)
    if any(n != 1 for n in array.shape[:-3]):
        array = jnp.broadcast_to(array, (*batch, *array.shape[-3:]))
    return array.reshape(-1, *array.shape[-3:])
