# SPDX-License-Identifier: Apache-2.0
"""Merges partial results of attention over different keys."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from ..errors import InputError
from ..placement import axes
from ..placement.arrays import as_array
from ..placement.platforms import refuse_different_devices
from .protocol import Block, Partial

_IN_ONE_SUM: Final = 8
"""Up to this many ranks, one all-reduce gathers the results of all ranks. On more ranks, the extra bytes of that cost
more than the latency of a second all-reduce."""

LARGEST_GROUP: Final = 16
"""The most chunks that one step merges. Compile time grows with the square of the chunks in a step."""


def empty(block: Block) -> Partial:
    """The identity of `merge` for the queries of `block`: no key seen yet."""
    batch, length, heads = block.q.shape[:3]
    out = jnp.zeros((batch, length, heads, block.value_dim), jnp.float32)
    lse = jnp.full((batch, heads, length), -jnp.inf, jnp.float32)
    return Partial(out, lse, lse if block.rule.return_max_logits else None)


def merge(a: Partial, b: Partial) -> Partial:
    """The partial result over the keys of `a` and of `b` together; both are of the same queries and of different keys.

    Associative and commutative up to rounding; `empty` is the identity. The result has `max_logits` if both have it,
    and `out` if one has it.
    """
    a, b = _arrays("a", a), _arrays("b", b)
    value_dim = next((x.out.shape[-1:] for x in (a, b) if x.out is not None), ())
    for argument, x in (("a", a), ("b", b)):
        _refuse_misfit(argument, x, a.lse.shape, value_dim)
    refuse_different_devices({"a": a.lse, "b": b.lse})
    return merged([a, b])


def _arrays(argument: str, x: Any) -> Partial:
    """The partial result `x` with JAX arrays; raises for anything else."""
    if not isinstance(x, Partial):
        raise InputError(argument, f"is {type(x).__name__}", "Pass Partial(out, lse)")
    given = {name: array for name, array in vars(x).items() if name == "lse" or array is not None}
    arrays = {name: as_array(argument, array) for name, array in given.items()}
    for name, array in arrays.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise InputError(argument, f"has {name} of dtype {array.dtype}", "Pass floating-point arrays")
    return Partial(arrays.pop("out", None), **arrays)


def _refuse_misfit(argument: str, x: Partial, rows: tuple[int, ...], value_dim: tuple[int, ...]) -> None:
    """Raises unless `lse` and `max_logits` have the shape `rows`, and `out` fits it, with values of `value_dim`."""
    shapes = {name: array.shape for name, array in vars(x).items() if array is not None}
    out = (rows[0], rows[2], rows[1], *value_dim) if len(rows) == 3 else None
    if any(shape != (out if name == "out" else out and rows) for name, shape in shapes.items()):
        fact = "has " + ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise InputError(argument, fact, "Both results need out (B, T, N, Hv) and lse (B, N, T) of equal sizes")


def merged_over(partial: Partial, axis: tuple[str, ...], chunks: int = 1, scattered: bool = False) -> Partial:
    """Merges the partial results of all ranks along the mesh axes `axis`, and of the `chunks` of keys on each rank.

    In `partial`, the results of the chunks of one row are consecutive rows of the batch. Every rank gets the
    whole result. If `scattered`, rank `r` gets only part `r` of the queries, which are cut into as many equal parts as
    there are ranks.
    """
    own = partial
    while chunks > 1:
        group = next((n for n in range(LARGEST_GROUP, 1, -1) if chunks % n == 0), chunks)
        assert own.out is not None
        out, lse = (x.reshape(-1, group, *x.shape[1:]) for x in (own.out, own.lse))
        own, chunks = merged([Partial(out[:, i], lse[:, i]) for i in range(group)]), chunks // group
    if not axis:
        return own
    ranks = axes.size(axis)
    if scattered or ranks > _IN_ONE_SUM:
        return _summed_over(own, axis, scattered)
    return merged(_of_all_ranks(own, axis, ranks))


def merged(parts: Sequence[Partial]) -> Partial:
    """Merges partial results of the same queries over different keys. A part without `out` has only weight.

    Written without a reduction, so that XLA fuses the merge with the packing of its result for a collective.
    """
    largest = functools.reduce(jnp.maximum, (part.lse for part in parts))
    safe = _finite(largest)
    weights = [jnp.exp(part.lse - safe) for part in parts]
    total = functools.reduce(jnp.add, weights)
    outs = [part.out * _over_out(w) for part, w in zip(parts, weights, strict=True) if part.out is not None]
    out = functools.reduce(jnp.add, outs) if outs else None
    known = [part.max_logits for part in parts if part.max_logits is not None]
    max_logits = functools.reduce(jnp.maximum, known) if len(known) == len(parts) else None
    return dataclasses.replace(_normalised(out, total, safe), max_logits=max_logits)


def _of_all_ranks(partial: Partial, axis: tuple[str, ...], ranks: int) -> list[Partial]:
    """The partial result of every rank, on every rank. Exact, though a sum: other ranks add zeros to a rank's part."""
    assert partial.out is not None
    packed = jnp.concatenate([partial.out, jnp.swapaxes(partial.lse, 1, 2)[..., None]], -1)
    own = (jnp.arange(ranks, dtype=jnp.int32) == axes.coordinate(axis))[:, None, None, None, None]
    packed = jax.lax.psum(jnp.where(own, packed, 0.0), axis)
    return [Partial(x[..., :-1], jnp.swapaxes(x[..., -1], 1, 2)) for x in packed]


def _summed_over(partial: Partial, axis: tuple[str, ...], scattered: bool) -> Partial:
    """Merges the partial results of all ranks by sums over ranks; `scattered` as in `merged_over`."""
    assert partial.out is not None
    largest = jax.lax.pmax(partial.lse, axis)
    safe = _finite(largest)
    weight = jnp.exp(partial.lse - safe)
    # The weights travel as one more component of the values, so that one collective does both sums.
    sums = jnp.concatenate([partial.out, jnp.ones_like(partial.out[..., :1])], -1) * _over_out(weight)
    if scattered:
        sums = jax.lax.psum_scatter(sums, axis, scatter_dimension=1, tiled=True)
        safe = jax.lax.dynamic_slice_in_dim(safe, axes.coordinate(axis) * sums.shape[1], sums.shape[1], 2)
    else:
        sums = jax.lax.psum(sums, axis)
    total = jnp.swapaxes(sums[..., -1], 1, 2)
    return _normalised(sums[..., :-1], total, safe)


def _finite(largest: Float32[Array, "*x"]) -> Float32[Array, "*x"]:
    """What to subtract from log-sum-exps before they become weights: the largest of them, or 0 where all are -inf."""
    return jnp.where(jnp.isneginf(largest), 0.0, largest)


def _normalised(out: jax.Array | None, total: jax.Array, subtracted: jax.Array) -> Partial:
    """The partial result from two sums, of weighted outputs and of weights `exp(lse - subtracted)`.

    The weights are not `exp(lse - total lse)`: at 1e4 an lse is rounded to 1e-3, and they would not add up to 1.
    """
    out = None if out is None else out / _over_out(jnp.where(total == 0, 1.0, total))
    return Partial(out, subtracted + jnp.log(total))


def _over_out(share: Float32[Array, "*B N T"]) -> Float32[Array, "*B T N 1"]:
    return jnp.swapaxes(share, -1, -2)[..., None]


def merging(forward: Callable[[Block], Partial]) -> Callable[[Block, Partial | None], Partial]:
    """Turns `forward`, a function of one block, into one that continues from a partial result, by `merge`.

    `forward` gets a block that is not `final` if its result is merged, so that the result is not rounded before.
    """

    def continued(block: Block, partial: Partial | None) -> Partial:
        if partial is None:
            return forward(block)
        return merged([partial, forward(dataclasses.replace(block, final=False))])

    return continued
