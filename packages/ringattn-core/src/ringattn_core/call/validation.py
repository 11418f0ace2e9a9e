# SPDX-License-Identifier: Apache-2.0
"""Whether a call makes sense: the only place that checks shapes, dtypes and options."""

import numbers
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from ..config import BwdParams, FwdParams
from ..contract.call import Call
from ..errors import InputError
from ..masks.int32 import fitting
from ..placement import axes
from ..placement import layout as layouts

DTYPES = ("float32", "float16", "bfloat16")
MOST_POSITION = 2**30
LARGEST, LEAST_NORMAL = (float(x) for x in (np.finfo(np.float32).max, np.finfo(np.float32).tiny))
PRECISIONS = ("default", "high", "highest")


def validated(
    query: Any,
    key: Any,
    value: Any,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    softmax_aux: Any = None,
    bias: Any = None,
    mask_builder: Any = None,
    sliding_window: Any = None,
    chunk_size: Any = None,
    causal: Any = False,
    logits_soft_cap: Any = None,
    softmax_scale: Any = None,
    axis_name: Any = None,
    fwd_params: Any = None,
    bwd_params: Any = None,
    fused_backward: Any = False,
    *,
    attention_mask: Any = None,
    q_positions: Any = None,
    kv_positions: Any = None,
    q_position_ids: Any = None,
    kv_position_ids: Any = None,
    alibi_slopes: Any = None,
    dropout_prob: Any = 0.0,
    dropout_seed: Any = None,
    batch_axis_name: Any = None,
    head_axis_name: Any = None,
    layout: Any = "contiguous",
    two_way: Any = False,
    precision: Any = None,
    return_lse: Any = False,
    ranks: int | None = None,
) -> Call:
    """The call in canonical form. `ranks` is over how many shards the keys given are spread: by default the size
    of the ring, and 1 where the arrays are global."""
    q, k, v = _operands(query, key, value)
    ring = axes.names(axis_name)
    if ranks is None:
        ranks = axes.size("axis_name", ring)
    batch_axes, head_axes = axes.names(batch_axis_name), axes.names(head_axis_name)
    for argument, given in (("batch_axis_name", batch_axes), ("head_axis_name", head_axes)):
        if ranks is not None and axis_name is not None and set(given) & set(ring):
            raise InputError(argument, f"{given} overlaps the ring's axis_name {ring}", "Name other axes")
    layout = layouts.canonical(layout)
    _layout_fits(layout, q, k, ranks)
    batch, q_length, heads, dim = q.shape
    columns = k.shape[1] * ranks
    q_ids, kv_ids = _segments(q_segment_ids, kv_segment_ids, q, k)
    q_positions = _one_of("q_positions", q_positions, "q_position_ids", q_position_ids)
    kv_positions = _one_of("kv_positions", kv_positions, "kv_position_ids", kv_position_ids)
    positions = _positions(q_positions, kv_positions, q, k)
    dropout = _number("dropout_prob", dropout_prob, "0 or in [2**-16, 1)", lambda p: p == 0 or 2**-16 <= p < 1) or 0.0
    return Call(
        query=q,
        key=k,
        value=v,
        q_segment_ids=q_ids,
        kv_segment_ids=kv_ids,
        softmax_aux=_sinks(softmax_aux, heads),
        bias=_dense("bias", bias, (batch, heads, q_length, columns), "floating", broadcast=3),
        mask_builder=_builder(mask_builder),
        sliding_window=_window(sliding_window),
        chunk_size=_chunk(chunk_size),
        causal=_flag("causal", causal),
        logits_soft_cap=_number(
            "logits_soft_cap", logits_soft_cap, "a normal float32 above 0", lambda c: c >= LEAST_NORMAL
        ),
        softmax_scale=dim**-0.5
        if softmax_scale is None
        else _number("softmax_scale", softmax_scale, "a finite float32"),
        axis_name=ring or None,
        fwd_params=FwdParams.of(fwd_params),
        bwd_params=BwdParams.of(bwd_params),
        fused_backward=_flag("fused_backward", fused_backward),
        attention_mask=_dense("attention_mask", attention_mask, (batch, heads, q_length, columns), "bool", broadcast=2),
        q_positions=positions[0],
        kv_positions=positions[1],
        alibi_slopes=_slopes(alibi_slopes, heads),
        dropout_prob=dropout,
        dropout_seed=_seed(dropout_seed, dropout),
        batch_axis_name=batch_axes or None,
        head_axis_name=head_axes or None,
        layout=layout,
        two_way=_two_way(two_way, k.shape[2]),
        precision=_precision(precision),
        return_lse=_flag("return_lse", return_lse),
    )


def _array(argument: str, x: Any) -> jax.Array:
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(
            argument, f"{type(x).__name__} is no array ({error})", "Pass what jnp.asarray accepts"
        ) from error


def _operands(query: Any, key: Any, value: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v = (_array(name, x) for name, x in (("query", query), ("key", key), ("value", value)))
    for name, x in (("query", q), ("key", k), ("value", v)):
        if x.ndim != 4:
            raise InputError(name, f"has shape {x.shape}", "Its four axes are (batch, length, heads, head size)")
        if 0 in x.shape:
            raise InputError(name, f"has shape {x.shape}, which is empty", "Every axis must be at least 1")
    if q.dtype.name not in DTYPES:
        raise InputError("query", f"has dtype {q.dtype}", f"Cast query, key and value to one of {', '.join(DTYPES)}")
    for name, x in (("key", k), ("value", v)):
        if x.dtype != q.dtype:
            raise InputError(name, f"has dtype {x.dtype} but query has {q.dtype}", "Cast all three to one dtype")
        if x.shape[0] != q.shape[0]:
            raise InputError(name, f"has batch {x.shape[0]} but query has {q.shape[0]}", "They must be equal")
    if k.shape[3] != q.shape[3]:
        raise InputError("key", f"has head size {k.shape[3]} but query has {q.shape[3]}", "They must be equal")
    if v.shape[1:3] != k.shape[1:3]:
        raise InputError(
            "value", f"has (length, heads) {v.shape[1:3]} but key has {k.shape[1:3]}", "They must be equal"
        )
    if q.shape[2] % k.shape[2]:
        raise InputError(
            "key",
            f"has {k.shape[2]} heads, which do not divide the {q.shape[2]} of query",
            "Query heads share key heads in equal groups",
        )
    return q, k, v


def _layout_fits(layout: str, q: jax.Array, k: jax.Array, ranks: int) -> None:
    parts = layouts.pieces(layout)
    for name, x in (("query", q), ("key", k)):
        if x.shape[1] % parts:
            raise InputError(
                "layout",
                f"{layout!r} needs an even local length, but {name} has {x.shape[1]} tokens on each rank",
                f"Pad the sequence to {(x.shape[1] + 1) * ranks} tokens, or use 'contiguous' or 'striped'",
            )


def _two_way(two_way: Any, key_heads: int) -> bool:
    wanted = _flag("two_way", two_way)
    if wanted:
        halves_go_both_ways(key_heads)
    return wanted


def halves_go_both_ways(key_heads: int) -> None:
    """Refuses a number of key heads on one rank that two ways round cannot share."""
    if key_heads % 2:
        raise InputError(
            "two_way",
            f"needs an even number of key heads on each rank, but there are {key_heads}",
            "Leave two_way out, or split the heads over fewer ranks",
        )


def _segments(q_ids: Any, kv_ids: Any, q: jax.Array, k: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
    if q_ids is None and kv_ids is None:
        return None, None
    if q_ids is None or kv_ids is None:
        given = "q_segment_ids" if kv_ids is None else "kv_segment_ids"
        other = "kv_segment_ids" if kv_ids is None else "q_segment_ids"
        if q.shape[1] != k.shape[1]:
            raise InputError(
                given, f"is given alone, but there are {q.shape[1]} queries and {k.shape[1]} keys", f"Pass {other} too"
            )
        q_ids = kv_ids = q_ids if kv_ids is None else kv_ids
        return (_ids(given, q_ids, q), _ids(given, kv_ids, k))
    return _ids("q_segment_ids", q_ids, q), _ids("kv_segment_ids", kv_ids, k)


def _ids(argument: str, x: Any, tokens: jax.Array) -> jax.Array:
    ids = _integers(argument, x)
    if ids.shape != tokens.shape[:2]:
        raise InputError(argument, f"has shape {ids.shape}", f"It needs {tokens.shape[:2]}: (batch, length)")
    return ids


def _integers(argument: str, x: Any) -> jax.Array:
    ids = _array(argument, x)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise InputError(argument, f"has dtype {ids.dtype}", "It needs integers")
    try:
        given = x if isinstance(x, jax.Array) else np.asarray(x)  # JAX cuts what has 64 bits here
    except jax.errors.TracerArrayConversionError:
        given = ids
    fitting(argument, given)
    return ids.astype(jnp.int32)


def _one_of(name: str, x: Any, alias: str, y: Any) -> Any:
    if x is not None and y is not None:
        raise InputError(alias, f"is another name of {name}, and both are given", f"Pass {name} only")
    return y if x is None else x


def _positions(q_positions: Any, kv_positions: Any, q: jax.Array, k: jax.Array) -> tuple[Any, Any]:
    if q_positions is None and kv_positions is None:
        return None, None
    if q_positions is None or kv_positions is None:
        given, other = ("q_positions", "kv_positions") if kv_positions is None else ("kv_positions", "q_positions")
        if q.shape[1] != k.shape[1]:
            raise InputError(
                given, f"is given alone, but there are {q.shape[1]} queries and {k.shape[1]} keys", f"Pass {other} too"
            )
        q_positions = kv_positions = q_positions if kv_positions is None else kv_positions
    found = []
    for argument, x, tokens in (("q_positions", q_positions, q), ("kv_positions", kv_positions, k)):
        x = _integers(argument, x)
        if x.shape not in (tokens.shape[1:2], tokens.shape[:2]):
            raise InputError(
                argument, f"has shape {x.shape}", f"It needs {tokens.shape[1:2]} or {tokens.shape[:2]}: (batch, length)"
            )
        found.append(x)
    return found[0], found[1]


def _sinks(x: Any, heads: int) -> jax.Array | None:
    if x is None:
        return None
    sinks = _floating("softmax_aux", x)
    if sinks.ndim == 1 and sinks.size:
        return sinks[:, None] if sinks.shape[0] == heads else jnp.broadcast_to(sinks, (heads, sinks.shape[0]))
    if sinks.ndim == 2 and sinks.size and sinks.shape[0] == heads:
        return sinks
    raise InputError(
        "softmax_aux",
        f"has shape {sinks.shape}",
        f"It needs ({heads},) for one sink a head, (n,) for n shared ones, or ({heads}, n)",
    )


def _floating(argument: str, x: Any) -> jax.Array:
    array = _array(argument, x)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise InputError(argument, f"has dtype {array.dtype}", "It needs floating-point numbers")
    return array


def _dense(argument: str, x: Any, full: tuple[int, ...], kind: str, broadcast: int) -> jax.Array | None:
    """An array of shape `full`, or 1 on any of the first `broadcast` axes."""
    if x is None:
        return None
    array = _array(argument, x) if kind == "bool" else _floating(argument, x)
    if kind == "bool" and array.dtype != jnp.bool_:
        raise InputError(argument, f"has dtype {array.dtype}", "It needs booleans, true where a query may see a key")
    fits = array.ndim == 4 and all(
        have == want or (have == 1 and axis < broadcast)
        for axis, (have, want) in enumerate(zip(array.shape, full, strict=True))
    )
    if not fits:
        wanted = ", ".join(f"1|{n}" if axis < broadcast and n != 1 else str(n) for axis, n in enumerate(full))
        raise InputError(
            argument, f"has shape {array.shape}", f"It needs ({wanted}): this rank's rows against all columns"
        )
    return array


def _slopes(x: Any, heads: int) -> jax.Array | None:
    if x is None:
        return None
    slopes = _floating("alibi_slopes", x)
    if slopes.shape != (heads,):
        raise InputError("alibi_slopes", f"has shape {slopes.shape}", f"It needs ({heads},): one for each query head")
    return slopes


def _builder(mask_builder: Any) -> Any:
    if mask_builder is not None and not callable(mask_builder):
        raise InputError(
            "mask_builder",
            f"got {type(mask_builder).__name__}",
            "It needs a function (q_len, kv_len, num_heads, head_idx, num_reps) -> mask",
        )
    return mask_builder


def _window(window: Any) -> tuple[int | None, int | None] | None:
    if window is None:
        return None
    sides = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
    if len(sides) != 2:
        raise InputError("sliding_window", f"got {window!r}", "Pass one width, or (left, right)")
    left, right = (_integer("sliding_window", side, 0) for side in sides)
    return _bounded(left), _bounded(right)


def _bounded(side: int | None) -> int | None:
    """A side of the window; `None` where no two positions are farther apart."""
    return None if side is None or side >= 2 * MOST_POSITION else side


def _chunk(size: Any) -> int | None:
    """A chunk size; larger ones than all positions cut where the largest does, at 0."""
    size = _integer("chunk_size", size, 1)
    return None if size is None else min(size, MOST_POSITION)


def _static(argument: str, x: Any) -> Any:
    if isinstance(x, jax.core.Tracer):
        raise InputError(
            argument, "is traced", "It shapes the program: pass a Python number, or mark it static in jax.jit"
        )
    return x.item() if isinstance(x, (np.generic, np.ndarray, jax.Array)) and np.ndim(x) == 0 else x


def _integer(argument: str, x: Any, least: int) -> int | None:
    if x is None:
        return None
    x = _static(argument, x)
    if isinstance(x, bool) or not isinstance(x, numbers.Integral) or x < least:
        raise InputError(argument, f"got {x!r}", f"It needs an integer of at least {least}, or None")
    return int(x)


def _number(argument: str, x: Any, wanted: str, accepts: Any = lambda x: True) -> Any:
    if x is None:
        return None
    x = _static(argument, x)
    size: Any = abs(x) if isinstance(x, numbers.Real) else None
    if isinstance(x, bool) or size is None or not size <= LARGEST or not accepts(x):
        raise InputError(argument, f"got {x!r}", f"It must be {wanted}")
    return float(x)


def _flag(argument: str, x: Any) -> bool:
    x = _static(argument, x)
    if not isinstance(x, bool):
        raise InputError(argument, f"got {x!r}", "It must be True or False")
    return x


def _seed(seed: Any, dropout: float) -> jax.Array | None:
    if dropout == 0.0:
        return None
    if seed is None:
        raise InputError(
            "dropout_seed", f"is missing with dropout_prob={dropout}", "Pass an integer, a new one each step"
        )
    if isinstance(seed, int) and not isinstance(seed, bool):
        seed = np.uint32(seed % 2**32)
    array = _array("dropout_seed", seed)
    if array.ndim or not jnp.issubdtype(array.dtype, jnp.integer):
        raise InputError("dropout_seed", f"has shape {array.shape} and dtype {array.dtype}", "It needs one integer")
    return array.astype(jnp.uint32)


def _precision(precision: Any) -> str | None:
    if precision is None:
        return None
    name = precision.name.lower() if isinstance(precision, jax.lax.Precision) else precision
    if name not in PRECISIONS:
        known = ", ".join(repr(p) for p in PRECISIONS)
        raise InputError("precision", f"got {precision!r}", f"Known precisions: None, {known}, jax.lax.Precision")
    return name
