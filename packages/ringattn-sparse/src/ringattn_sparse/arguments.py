# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of `select` and `teach`, and brings their arrays into the form that the ring takes."""

import numbers
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from ringattn_core.contract.varying import align, axes_of
from ringattn_core.errors import InputError

Names = str | tuple[str, ...] | list[str] | None
FLOATS: Final = (jnp.float32, jnp.float16, jnp.bfloat16)


def whole(argument: str, x: Any, least: int) -> int:
    """`x` as a Python integer; raises unless it is one of at least `least`."""
    if isinstance(x, bool) or not isinstance(x, numbers.Integral) or int(x) < least:
        raise InputError(argument, f"got {x!r}", f"It needs an integer of at least {least}, known outside jax.jit")
    return int(x)


def flag(argument: str, x: Any) -> bool:
    """`x` as a bool; raises unless it is True, False, 0 or 1."""
    if not isinstance(x, numbers.Integral | np.bool_) or x not in (0, 1):
        raise InputError(argument, f"got {x!r}", "Pass True or False, known outside jax.jit")
    return bool(x)


def function(argument: str, x: Any) -> Any:
    """`x`; raises unless it can be called or is `None`."""
    if x is not None and not callable(x):
        raise InputError(argument, f"got {x!r}", "Pass a function of an array, or None")
    return x


def floats(argument: str, x: Any, *shapes: str, like: jax.Array | None = None) -> jax.Array:
    """`x` as an array of float32, float16 or bfloat16, with as many axes as one of the `shapes`, such as "B T I D".

    With `like`, it also has the dtype of that array.
    """
    if x is None:
        raise InputError(argument, "is missing", f"Pass an array [{shapes[0]}]")
    x = jnp.asarray(x)
    if x.ndim not in [len(shape.split()) for shape in shapes]:
        raise InputError(argument, f"has shape {x.shape}", f"Pass [{'] or ['.join(shapes)}]")
    if x.dtype not in FLOATS:
        raise InputError(argument, f"has dtype {x.dtype}", "Pass float32, float16 or bfloat16")
    if like is not None and x.dtype != like.dtype:
        raise InputError(argument, f"has dtype {x.dtype}, and its queries {like.dtype}", "Cast both to one dtype")
    return x


def integers(argument: str, x: Any, remedy: str) -> jax.Array:
    """`x` as an array of int32; raises for other numbers, and for integers beyond int32."""
    given = x if isinstance(x, jax.Array) else np.asarray(x)
    if not jnp.issubdtype(given.dtype, jnp.integer):
        raise InputError(argument, f"has dtype {given.dtype}", remedy)
    if isinstance(given, np.ndarray) and given.size and (given.min() < -(2**31) or given.max() >= 2**31):
        raise InputError(argument, f"has values from {given.min()} to {given.max()}", "Pass values that fit int32")
    return jnp.asarray(given).astype(jnp.int32)


def sized(argument: str, x: jax.Array, *wanted: tuple[int, ...]) -> None:
    """Raises unless the array has one of the shapes in `wanted`."""
    if x.shape not in wanted:
        raise InputError(argument, f"has shape {x.shape}", f"Pass {' or '.join(map(str, dict.fromkeys(wanted)))}")


def index_arrays(query: Any, key: Any, weights: Any, groups: Any) -> tuple[jax.Array, jax.Array, Any, int]:
    """The indexer's arrays and the number of groups; the keys as `[B, S, 1 or groups, D]`, the weights as float32."""
    groups = whole("groups", groups, 1)
    query = floats("index_query", query, "B T I D")
    key = floats("index_key", key, "B S D", "B S groups D", like=query)
    key = key[:, :, None] if key.ndim == 3 else key
    batch, tokens, heads, size = query.shape
    refuse_undivided("groups", groups, heads, "index heads")
    if key.shape[0] != batch or key.shape[3] != size or key.shape[2] not in (1, groups):
        fact = f"has {key.shape[0]} rows, {key.shape[2]} heads of {key.shape[3]}; index_query has {batch} rows, and "
        fact += f"heads of {size} in {groups} groups"
        raise InputError("index_key", fact, "Pass [B, S, D], or [B, S, groups, D]")
    if weights is not None:
        weights = floats("weights", weights, "B T I")
        sized("weights", weights, (batch, tokens, heads))
        weights = weights.astype(jnp.float32)
    return query, key, weights, groups


def refuse_undivided(argument: str, groups: int, heads: int, what: str) -> None:
    if heads % groups:
        fits = ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)
        raise InputError(argument, f"is {groups}, which does not divide the {heads} {what}", f"Pass one of {fits}")


def segments(q_ids: Any, kv_ids: Any, queries: jax.Array, keys: jax.Array) -> tuple[Any, Any]:
    """The segment ids of queries and keys; one given alone serves both. `None` if neither is given."""
    if q_ids is None and kv_ids is None:
        return None, None
    if (q_ids is None or kv_ids is None) and queries.shape[1] != keys.shape[1]:
        missing = "q_segment_ids" if q_ids is None else "kv_segment_ids"
        fact = f"are missing, and there are {queries.shape[1]} queries and {keys.shape[1]} keys"
        raise InputError(missing, fact, "Pass both")
    found = {}
    for name, ids, x in (("q_segment_ids", q_ids, queries), ("kv_segment_ids", kv_ids, keys)):
        if ids is not None:
            found[name] = integers(name, ids, "It needs integers")
            sized(name, found[name], x.shape[:2])
    given = [*found.values()]
    return given[0], given[-1]


def ranks_here(axis_name: Names) -> int | None:
    """The number of ranks, if arrays are local: a surrounding `shard_map` or `vmap` binds the axes. Else `None`."""
    try:
        names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name or ())
        return int(np.prod([jax.lax.axis_size(name) for name in names])) if names else None
    except (NameError, TypeError):
        return None


class Blocks:
    """How keys form blocks of `size`: block `i` has the keys with the indices from `i * size` on."""

    def __init__(self, argument: str, size: Any, keys: int, axis_name: Names, layout: Any):
        self.argument, self.size = argument, whole(argument, size, 1)
        self.missing, ranks = -keys % self.size, ranks_here(axis_name)
        if layout == "striped" and self.size > 1:
            fact = f"is {self.size}, but in striped order neighbouring keys lie on different ranks"
            raise InputError(argument, fact, f"Use blocks of one key, {argument}=1, or another layout")
        if self.missing and ranks is not None and ranks > 1:
            fact = f"is {self.size}, which does not divide the shard of a rank, of {keys} keys"
            raise InputError(argument, fact, f"Pad the keys of each rank to {keys + self.missing}")
        if self.missing and ranks is None and axis_name is not None and layout != "contiguous":
            fact = f"is {self.size}, which does not divide the {keys} keys, whose end is not that of the sequence here"
            raise InputError(argument, fact, f"Pad the sequence to {keys + self.missing} tokens before to_layout")
        self.count = -(-keys // self.size) * (ranks or 1)

    @property
    def name(self) -> str:
        """How errors of the ring name the keys."""
        return "index_key" if self.size == 1 else f"index_key, counted in blocks of {self.argument}={self.size},"

    def split(self, x: Any, fill: int = 0) -> Any:
        """`[B, S, ...]` as `[B, blocks, size, ...]`; `fill` fills the last block. `None` stays."""
        if x is None:
            return x
        if self.missing:
            padding = ((0, 0), (0, self.missing), *[(0, 0)] * (x.ndim - 2))
            x = jnp.pad(x, padding, constant_values=fill)
        return x.reshape(x.shape[0], -1, self.size, *x.shape[2:])

    def segments(self, q_ids: Any, kv_ids: Any, queries: jax.Array, keys: jax.Array) -> tuple[Any, Any]:
        """The checked segment ids, those of keys in blocks. Where the last block is not full, all tokens get ids."""
        q_ids, kv_ids = segments(q_ids, kv_ids, queries, keys)
        if self.missing and q_ids is None:
            q_ids, kv_ids = (jnp.zeros(x.shape[:2], jnp.int32) for x in (queries, keys))
        # Ranks may have the same ids, so JAX may not know that they vary over the ring.
        return align((q_ids, self.split(kv_ids, -1)), axes_of(queries, keys))
