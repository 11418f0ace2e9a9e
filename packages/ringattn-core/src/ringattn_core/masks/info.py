# SPDX-License-Identifier: Apache-2.0
"""A pytree of the arrays that say which keys are visible (ids, positions, ranges, a dense mask), and their sharding."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int32

from ..errors import InputError
from ..integers import INT32, POSITION, Limits, as_given, as_int32, static, whole
from ..placement import arrays, axes
from ..placement.axes import AxisName
from ..placement.mesh import over_explicit, sharding_of


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MaskInfo:
    """Arrays that say which keys a query sees: a key that every field allows. A field that is `None` hides nothing.

    No field is converted to another: a dense mask stays dense, ids stay ids. To combine two, such as ids and a dense
    mask, set the second field with `dataclasses.replace`.

    Args:
        q_segment_ids: `[B, T]`. A query sees the keys with its own id; a negative id is padding.
        kv_segment_ids: `[B, S]`.
        q_positions: `[T]` or `[B, T]`: the positions of queries, as in `ring_attention`.
        kv_positions: `[S]` or `[B, S]`.
        attention_mask: A dense mask, true where a query sees a key, `[b, n, T, S_global]`.
        kv_range: The first and the last position that each query sees, as in `ring_attention`.
    """

    q_segment_ids: arrays.QueryIds | None = None
    kv_segment_ids: arrays.KeyIds | None = None
    q_positions: arrays.QueryPositions | None = None
    kv_positions: arrays.KeyPositions | None = None
    attention_mask: arrays.DenseMask | np.ndarray | None = None
    kv_range: tuple[Any, Any] | None = None

    @classmethod
    def from_segments(cls, q: Any, kv: Any = None) -> Self:
        """Queries see the keys of their own segment; a negative id is padding. Without `kv`, keys have the ids `q`."""
        q_ids = _integers("q_segment_ids", q, ranks=(2,))
        return cls(q_ids, q_ids if kv is None else _integers("kv_segment_ids", kv, ranks=(2,)))

    @classmethod
    def from_lengths(
        cls, q_lengths: Any, kv_lengths: Any = None, q_max: int | None = None, kv_max: int | None = None
    ) -> Self:
        """Batch row `b` has `q_lengths[b]` queries and `kv_lengths[b]` keys, then padding to `q_max` and `kv_max`.

        Without a maximum, rows are padded to the longest row. Without `kv_lengths`, `q_lengths` serves both.
        """
        q_ids = _ids_of_lengths("q_lengths", q_lengths, "q_max", q_max)
        if kv_lengths is None and kv_max is None:
            return cls(q_ids, q_ids)
        given = ("kv_lengths", kv_lengths) if kv_lengths is not None else ("q_lengths", q_lengths)
        kv_ids = _ids_of_lengths(*given, "kv_max", kv_max)
        if kv_ids.shape[0] != q_ids.shape[0]:
            fact = f"has {kv_ids.shape[0]} rows where q_lengths has {q_ids.shape[0]}"
            raise InputError("kv_lengths", fact, "Give one length a row")
        return cls(q_ids, kv_ids)

    @classmethod
    def from_documents(cls, lengths: Any, total: int | None = None, restart_positions: bool = False) -> Self:
        """Documents packed one after another in each batch row, then padding up to `total`, or to the longest row.

        `lengths` are the lengths of the documents of one row, or a list of them for each row. Ids count from 0.
        With `restart_positions` every document starts at position 0 again.
        """
        rows = _rows_of_documents(lengths)
        longest = max((int(row.sum()) for row in rows), default=0)
        total = longest if total is None else whole("total", static("total", total), 0)
        ids = np.full((len(rows), total), -1, np.int32)
        positions = np.zeros((len(rows), total), np.int32)
        for number, row in enumerate(rows):
            used = int(row.sum())
            if used > total:
                fact = f"row {number} sums to {used}, more than {total=}"
                raise InputError("lengths", fact, "Raise total or cut the row")
            ids[number, :used] = np.repeat(np.arange(row.size), row)
            positions[number, :used] = np.arange(used) - np.repeat(np.cumsum(row) - row, row)
            positions[number, used:] = np.arange(total - used)
        on_device = jnp.asarray(ids)
        where = jnp.asarray(positions) if restart_positions else None
        return cls(on_device, on_device, where, where)

    @classmethod
    def from_mask(cls, mask: Any) -> Self:
        """A dense mask, true where visible: `[B|1, N|1, T, S]`; `[T, S]` and `[B, T, S]` get the missing axes.

        The axis T is sharded like the queries and in layout order; every rank has the whole axis S, in natural order.
        """
        dense = as_given("attention_mask", mask)
        if dense.dtype != jnp.bool_ or dense.ndim not in (2, 3, 4):
            shapes = "[T, S], [B, T, S] or [B or 1, N or 1, T, S]"
            remedy = f"Pass booleans {shapes}, true where visible; scores to add go in bias="
            raise InputError("attention_mask", f"has dtype {dense.dtype} and shape {dense.shape}", remedy)
        if dense.ndim == 2:
            dense = dense[None]
        return cls(attention_mask=dense if dense.ndim == 4 else dense[:, None])

    @classmethod
    def from_positions(cls, q: Any, kv: Any = None) -> Self:
        """Positions that the caller chooses, `[T]` or `[B, T]`, in any order. Without `kv`, keys have positions `q`."""
        q_positions = _integers("q_positions", q, ranks=(1, 2), limits=POSITION)
        kv_positions = q_positions if kv is None else _integers("kv_positions", kv, ranks=(1, 2), limits=POSITION)
        return cls(q_positions=q_positions, kv_positions=kv_positions)

    @classmethod
    def from_spans(cls, ids: Any, window: int | None = None) -> Self:
        """A causal mask, in which the tokens of a span, such as an image, also see each other in both directions.

        Consecutive tokens with the same id are a span; a token with a negative id is in none. With a `window`, causal
        attention reaches only so many positions back; spans stay whole. It takes 8 bytes a query.

        Args:
            ids: The span of each token of the whole sequence in natural order, `[B, T]`; it may be traced.
            window: How many positions before itself a query sees outside its span; `None` is unbounded.
        """
        known = _whole_rows(_integers("ids", ids, ranks=(2,)))
        index = jax.lax.broadcasted_iota(jnp.int32, known.shape, 1)
        begins = jnp.pad(known[:, 1:] != known[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        ends = jnp.pad(begins[:, 1:], ((0, 0), (0, 1)), constant_values=True)
        first = jax.lax.cummax(jnp.where(begins, index, 0), axis=1)
        last = jax.lax.cummin(jnp.where(ends, index, INT32[1]), axis=1, reverse=True)
        in_span = known >= 0
        if window is None:
            first = jnp.full_like(index, INT32[0])
        else:
            back = index - whole("window", static("window", window), 0)
            first = jnp.where(in_span, jnp.minimum(first, back), back)
        return cls(kv_range=(first, jnp.where(in_span, last, index)))

    @classmethod
    def from_prefixes(cls, lengths: Any, total: int, window: int | None = None) -> Self:
        """A causal mask, in which the first `lengths[b]` tokens of batch row `b` also see each other.

        It is `from_spans` with one span at the start of each row.

        Args:
            lengths: The number of tokens of the prefix of each row, `[B]`; it may be traced.
            total: The number of tokens of a row.
            window: As in `from_spans`.
        """
        known = as_int32("lengths", lengths)
        if known.ndim != 1:
            raise InputError("lengths", f"has shape {known.shape}", "Pass one length for each row")
        index = jnp.arange(whole("total", static("total", total), 1), dtype=jnp.int32)
        return cls.from_spans(jnp.where(index[None] < known[:, None], 0, -1), window)

    def specs(self, batch_axes: AxisName, sequence_axis: AxisName, head_axes: AxisName = None) -> "MaskInfo":
        """A `MaskInfo` with a `PartitionSpec` in place of each array: batch, sequence and heads over these mesh axes.

        The axis S of the dense mask, and its axes of length 1, are not split.
        """
        roles = arrays.Roles(*(axes.names(given) for given in (batch_axes, sequence_axis, head_axes)))

        def spec(name: str, x: Any) -> Any:
            if name == "kv_range":
                kinds = ((arrays.KeyRange if np.ndim(end) == 3 else arrays.QueryPositions, end) for end in x)
                return tuple(roles.spec(kind, np.shape(end)) for kind, end in kinds)
            return roles.spec(arrays.types_of(MaskInfo)[name], x.shape)

        return MaskInfo(**{name: spec(name, x) for name, x in vars(self).items() if x is not None})


def _whole_rows(ids: Int32[Array, "B T"]) -> Int32[Array, "B T"]:
    """The ids, with no explicit mesh axis over their tokens: JAX does not cut an axis that one splits."""
    known = sharding_of(ids)
    return over_explicit(ids, known.mesh, P(known.spec[0], None)) if isinstance(known, NamedSharding) else ids


def _integers(argument: str, value: Any, ranks: tuple[int, ...], limits: Limits = INT32) -> Int32[Array, "..."]:
    array = as_int32(argument, value, limits)
    if array.ndim not in ranks:
        shapes = " or ".join(("[T]", "[B, T]")[rank - 1] for rank in ranks)
        raise InputError(argument, f"has shape {array.shape}", f"Pass {shapes}")
    return array


def _ids_of_lengths(argument: str, lengths: Any, limit: str, longest: int | None) -> Int32[Array, "B T"]:
    array = as_given(argument, lengths)
    longest = None if longest is None else whole(limit, static(limit, longest), 0)
    if array.ndim != 1 or not jnp.issubdtype(array.dtype, jnp.integer):
        raise InputError(argument, f"has shape {array.shape} and dtype {array.dtype}", "Pass one integer for each row")
    if not isinstance(array, jax.core.Tracer):
        known = np.asarray(array)
        if known.size and known.min() < 0:
            raise InputError(argument, f"holds {known.min()}", "Pass lengths of 0 or more")
        largest = int(known.max(initial=0))
        if longest is not None and largest > longest:
            raise InputError(argument, f"holds {largest}, more than {limit}={longest}", f"Raise {limit} or cut the row")
        longest = largest if longest is None else longest
    if longest is None:
        fact = f"is not given and {argument} is traced"
        raise InputError(limit, fact, "Pass the padded length, which must be static")
    real = jnp.arange(longest)[None] < jnp.asarray(array)[:, None]
    return jnp.where(real, 0, -1).astype(jnp.int32)


def _rows_of_documents(lengths: Any) -> list[np.ndarray]:
    if isinstance(lengths, jax.core.Tracer):
        raise InputError("lengths", "is traced", "Pass host integers, or ids to MaskInfo.from_segments")
    nested = isinstance(lengths, Sequence) and any(np.ndim(row) for row in lengths)
    rows = [np.asarray(row) for row in (lengths if nested or np.ndim(lengths) == 2 else [lengths])]
    for row in rows:
        if row.ndim != 1 or (row.size and not np.issubdtype(row.dtype, np.integer)) or (row.size and row.min() < 0):
            raise InputError("lengths", f"got {lengths!r}", "Pass the lengths of the documents, integers of 0 or more")
    return [row.astype(np.int64) for row in rows]
