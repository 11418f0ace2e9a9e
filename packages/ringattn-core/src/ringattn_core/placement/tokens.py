# SPDX-License-Identifier: Apache-2.0
"""What layers beside attention need of a ring: tokens of neighbours, entries of a cache, a batch in layout order."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..errors import InputError, MeshError
from ..integers import INT32, as_int32, integers, static, whole
from . import axes
from .arrays import BATCH_AXES, as_array
from .axes import AxisName
from .layout import Shards, canonical, pieces, refuse_indivisible
from .mesh import over_explicit, over_shards, placed, ranks_of, sharding_of
from .reorder import to_layout
from .split import Split, split_of


def shift(
    x: Any,
    n: int,
    *,
    segment_ids: Any = None,
    axis_name: AxisName = None,
    mesh: Any = None,
    layout: str = "contiguous",
    fill: float = 0,
) -> jax.Array:
    """For each token, the entry of `x` of the token `n` places later in the sequence, whichever rank holds that one.

    `shift(tokens, 1)` are next-token labels; `shift(labels, 1)` are the labels of a second head (multi-token
    prediction). A negative `n` looks back. Where the sequence has no such token, or it belongs to another segment, the
    result is `fill`. A rank sends `|n|` tokens; in the zigzag layout twice, and in the striped layout its whole shard.
    Differentiable.

    With `mesh`, or under `jax.set_mesh`, arrays are global; in your own `jax.shard_map`, they are this rank's shard.

    Args:
        x: An array of tokens, `[B, T, ...]`, in the order of `layout`.
        n: How many places later; at most the number of consecutive tokens that a rank holds, unless striped.
        segment_ids: The document of each token, `[B, T]`, in the order of `layout`; a negative id is padding.
        axis_name: The mesh axes of the ring; `None` if the sequence is not split.
        mesh: The mesh over which the ring splits the global arrays.
        layout: As in `ring_attention`.
        fill: The entry where there is no such token: a number that the dtype of `x` can hold.
    """
    places = (whole("n", n, -(2**31), remedy="Pass an integer: how many places later"),)
    return _moved(x, segment_ids, (mesh, axis_name, layout), places, fill, "n")[0]


def halo(
    x: Any,
    width: int,
    *,
    segment_ids: Any = None,
    axis_name: AxisName = None,
    mesh: Any = None,
    layout: str = "contiguous",
) -> tuple[jax.Array, ...]:
    """`x` and the `width` tokens before each token: `width + 1` arrays like `x`, the farthest token first, `x` last.

    So `sum(w * y for w, y in zip(weights, halo(x, 3)))` is a causal convolution over four tokens. Entries before the
    start of the sequence, or of another segment, are 0, as are those of padding. A rank sends `width` tokens in
    one message; in the zigzag layout twice, and in the striped layout its whole shard up to `width` times.
    Differentiable.

    Args:
        x: An array of tokens, `[B, T, ...]`, in the order of `layout`.
        width: How many tokens before; at most the number of consecutive tokens that a rank holds, unless striped.
        segment_ids: As in `shift`.
        axis_name: As in `shift`.
        mesh: As in `shift`.
        layout: As in `ring_attention`.
    """
    width = whole("width", width, 0, remedy="Pass how many tokens before each one are needed, 0 or more")
    return _moved(x, segment_ids, (mesh, axis_name, layout), tuple(range(-width, 1)), 0, "width")


def write_cache(
    cache: Any, new: Any, positions: Any, *, axis_name: AxisName = None, mesh: Any = None, layout: str = "contiguous"
) -> Any:
    """Writes the entries of new tokens, and returns the cache. Each rank writes to its own shard. Differentiable.

    Positions below 0, or beyond the room of the cache, are not written. Floating-point entries are rounded to the dtype
    of the cache; other dtypes must be equal. With `mesh`, or under `jax.set_mesh`, arrays
    are global. Inside your own `jax.shard_map`, the cache is this rank's shard; new entries and positions are the same
    on all ranks of the ring.

    Args:
        cache: An array `[B, S, ...]` in the order of `layout`, or a pytree of them, such as a pair of keys and values.
        new: The entries of the new tokens, `[B, T, ...]`, or a pytree like `cache`.
        positions: The position of each new token in its row: `[B, T]`, or `[T]` for all rows alike.
        axis_name: The mesh axes of the ring that splits the cache; `None` if the cache is not split.
        mesh: The mesh over which the ring splits the global cache.
        layout: As in `decode_attention`.
    """
    at, of_cache, of_new = as_int32("positions", positions), jax.tree.structure(cache), jax.tree.structure(new)
    if of_cache != of_new:
        fact = f"is the pytree {of_new}, and the cache {of_cache}"
        raise InputError("new", fact, "Pass one new array for each array of the cache")
    cache = jax.tree.map(lambda x: as_array("cache", x), cache)
    new = jax.tree.map(lambda x: as_array("new", x), new)
    split = split_of(mesh, {"axis_name": axis_name}, {"cache": cache}, {"new": new, "positions": at})

    def written(held: jax.Array, x: jax.Array) -> jax.Array:
        ring = TokenRing.of("cache", held, split, layout)
        if x.shape != (held.shape[0], *x.shape[1:2], *held.shape[2:]):
            fact = f"has shape {x.shape}, and the cache {held.shape}"
            raise InputError("new", fact, "Pass [B, T, ...] for a cache [B, S, ...], alike but for the tokens")
        if x.dtype != held.dtype and not all(jnp.issubdtype(y.dtype, jnp.floating) for y in (x, held)):
            fact = f"has dtype {x.dtype}, and the cache {held.dtype}"
            raise InputError("new", fact, "Convert it first: only floating-point numbers are rounded to the cache's")
        if at.shape not in (x.shape[:2], x.shape[1:2]):
            fact = f"has shape {at.shape}, and there are {x.shape[1]} new tokens in {x.shape[0]} rows"
            raise InputError("positions", fact, "Pass [B, T] or [T]")
        return ring.run(_write, (), (True, False, False), held, x, jnp.broadcast_to(at, x.shape[:2]))

    return jax.tree.map(written, cache, new)


def layout_batch(
    batch: Mapping[str, Any],
    layout: str,
    mesh: Mesh,
    *,
    axis_name: AxisName = "sp",
    batch_axis_name: AxisName = None,
) -> dict[str, jax.Array]:
    """The arrays of a training step, in the order of `layout`, each placed on the mesh. Runs on the host.

    The result adds three arrays: "labels", the next token of the same document, or 0 if there is none; "loss_weights",
    1.0, or 0.0 if there is no label; and "positions", which count from the start of each document. An array that
    `batch` already has under one of these names is kept. Every process passes the whole batch; its devices get their
    part.

    Args:
        batch: Arrays `[B, T, ...]` in natural order by name: "tokens", "segment_ids" where rows hold several documents
            or padding (a negative id), and any others.
        layout: As in `ring_attention`.
        mesh: The mesh of the training step.
        axis_name: The mesh axes of the ring, which split the tokens.
        batch_axis_name: The mesh axes that split the rows; by default those with the usual names, such as "data".
    """
    layout = canonical(layout)
    if not isinstance(mesh, Mesh):
        raise MeshError(f"mesh is {type(mesh).__name__}. Pass a jax.sharding.Mesh, which has devices")
    rows = tuple(name for name in mesh.axis_names if name in BATCH_AXES and name not in axes.names(axis_name))
    rows = rows if batch_axis_name is None else axes.names(batch_axis_name, "batch_axis_name")
    _, ring, ranks = split_of(mesh, {"axis_name": axis_name or (), "batch_axis_name": rows}, {})
    if "tokens" not in batch or any(isinstance(x, jax.core.Tracer) for x in batch.values()):
        fact = "is traced" if "tokens" in batch else f"has {', '.join(map(repr, batch)) or 'nothing'}"
        raise InputError("batch", fact, "Pass arrays of the host by name, 'tokens' among them, outside jax.jit")
    natural = {name: np.asarray(x) for name, x in batch.items()}
    tokens, groups = natural["tokens"], ranks_of(mesh, rows)
    if tokens.ndim != 2:
        raise InputError("tokens", f"has shape {tokens.shape}", "Pass [B, T]; other arrays may have more axes")
    for name, x in natural.items():
        if x.shape[:2] != tokens.shape:
            fact = f"has shape {x.shape}, and the tokens have {tokens.shape}"
            raise InputError(name, fact, "Pass arrays [B, T, ...] with as many rows and tokens")
    if len(tokens) % groups:
        fact = f"there are {len(tokens)}, which the {groups} ranks of mesh axes {rows} do not divide"
        raise InputError("rows", fact, "Pass a multiple, or batch_axis_name=() to leave rows whole")
    refuse_indivisible("tokens", tokens.shape[1], layout, ranks)
    ids = integers("segment_ids", natural.get("segment_ids", np.zeros(tokens.shape, np.int32)), INT32)
    found = {}
    for name, x in (_derived(tokens, ids) | natural).items():
        x = to_layout(x.astype(jax.dtypes.canonicalize_dtype(x.dtype)), layout, ranks)
        found[name] = jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(rows, ring)), x.__getitem__)
    return found


def _derived(tokens: np.ndarray, ids: np.ndarray) -> dict[str, np.ndarray]:
    """The labels, loss weights and positions of tokens in natural order, `[B, T]`."""
    same = (ids[:, 1:] == ids[:, :-1]) & (ids[:, 1:] >= 0)
    index = np.arange(tokens.shape[1], dtype=np.int32)
    starts = np.where(np.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0))), index, 0)
    after = ((0, 0), (0, 1))
    return {
        "labels": np.pad(np.where(same, tokens[:, 1:], 0), after),
        "loss_weights": np.pad(same.astype(np.float32), after),
        "positions": index - np.maximum.accumulate(starts, 1),
    }


class TokenRing(NamedTuple):
    """The ring that splits the tokens of a call, as `Split` has it, and their layout."""

    mesh: Any
    names: tuple[str, ...]
    ranks: int
    layout: str

    @classmethod
    def of(cls, argument: str, x: jax.Array, split: Split, layout: str) -> "TokenRing":
        """Returns the ring. Raises unless it can split `x`, `[B, T, ...]`, which was passed as `argument`."""
        ring = cls(*split, canonical(layout))
        if x.ndim < 2:
            raise InputError(argument, f"has shape {x.shape}", "Pass an array [B, T, ...]")
        refuse_indivisible(argument, x.shape[1] * (ring.ranks if ring.mesh is None else 1), ring.layout, ring.ranks)
        return ring

    def run(
        self,
        work: Callable[..., Any],
        options: tuple[Any, ...],
        split: tuple[bool, ...],
        *arrays: Any,
        alike: bool = True,
    ) -> Any:
        """`work(ring, *options, *arrays)` on each rank's shards, or on local arrays.

        `work` and `options` are hashable. The ring splits axis 1 of the arrays for which `split` is true. The first
        axis of all arrays is split as that of the first array, as far as JAX says how it is split. So are their other
        axes if the arrays are `alike`; else these are whole.
        """
        known, mesh = sharding_of(arrays[0]), self.mesh
        if not isinstance(known, NamedSharding) or (mesh and known.mesh.abstract_mesh != mesh.abstract_mesh):
            known = NamedSharding(mesh, P()) if mesh else None
        spec = (*(known.spec if known else ()), *[None] * arrays[0].ndim)[: arrays[0].ndim]
        rows, _, *others = (None if {*axes.names(entry)} & {*self.names} else entry for entry in spec)
        others = others if alike else []
        tokens = self.names if mesh else None
        specs = tuple(P(*(rows, tokens if x else None, *others)[: y.ndim]) for x, y in zip(split, arrays, strict=True))
        if known:
            # JAX does not say how automatic axes split a traced array: XLA decides.
            places = [placed if mesh and not isinstance(x, jax.core.Tracer) else over_explicit for x in arrays]
            where = mesh or known.mesh
            arrays = tuple(place(x, where, spec) for place, x, spec in zip(places, arrays, specs, strict=True))
        if mesh is None or not any(specs[0]):
            return work(self, *options, *arrays)
        return over_shards(work, (self, *options), mesh, specs, *arrays)


def _moved(x: Any, ids: Any, ring: tuple[Any, AxisName, str], places: tuple[int, ...], fill: Any, argument: str) -> Any:
    """For each of `places`, `x` of the token so many places later, else `fill`. `argument` says the farthest place.

    `ring` is the mesh, the axis names and the layout of the call.
    """
    x, (mesh, axis_name, layout) = as_array("x", x), ring
    ring_of_x = TokenRing.of("x", x, split_of(mesh, {"axis_name": axis_name}, {"x": x}), layout)
    local = x.shape[1] // (1 if ring_of_x.mesh is None else ring_of_x.ranks)
    farthest, run = max(map(abs, places)), local // pieces(ring_of_x.layout)
    if ring_of_x.ranks > 1 and ring_of_x.layout != "striped" and farthest > run:
        fact = f"{farthest} is more than the {run} consecutive tokens that each of {ring_of_x.ranks} ranks holds"
        raise InputError(argument, fact, f"Pass at most {run}, or split the sequence over fewer ranks")
    arrays = [x] if ids is None else [x, as_int32("segment_ids", ids)]
    if ids is not None and arrays[1].shape != x.shape[:2]:
        raise InputError("segment_ids", f"has shape {arrays[1].shape}", f"Pass an id for each token, {x.shape[:2]}")
    return ring_of_x.run(_move, (places, _filling(fill, x.dtype)), (True,) * len(arrays), *arrays)


def _filling(fill: Any, dtype: Any) -> Any:
    """`fill` as a Python number; raises unless an array of this dtype can hold it. It may round fractions."""
    fill, fits = static("fill", fill), False
    if isinstance(fill, int | float) and jnp.issubdtype(dtype, jnp.inexact):
        fits = not math.isfinite(fill) or abs(fill) <= float(jnp.finfo(dtype).max)
    elif isinstance(fill, int | float):
        least, most = (0, 1) if dtype == jnp.bool_ else (int(x) for x in (jnp.iinfo(dtype).min, jnp.iinfo(dtype).max))
        fits = least <= fill <= most and fill == int(fill)
    if not fits:
        raise InputError("fill", f"got {fill!r}", f"Pass a number that an array of {dtype} can hold")
    return fill


def _move(
    ring: TokenRing, places: tuple[int, ...], fill: float, x: jax.Array, ids: Any = None
) -> tuple[jax.Array, ...]:
    """The work of `_moved` on one rank's tokens."""
    index = Shards(ring.layout, ring.ranks).indices(axes.coordinate(ring.names), x.shape[1])[None]
    theirs = [None] * len(places) if ids is None else _tokens_at(ring, places, ids)
    found = []
    for place, there, other in zip(places, _tokens_at(ring, places, x), theirs, strict=True):
        exists = (index + place >= 0) & (index + place < ring.ranks * x.shape[1])
        exists = exists if ids is None else exists & (ids == other) & (ids >= 0)
        found.append(jnp.where(jax.lax.expand_dims(exists, range(2, x.ndim)), there, jnp.asarray(fill, x.dtype)))
    return tuple(found)


def _tokens_at(ring: TokenRing, places: tuple[int, ...], x: jax.Array) -> list[jax.Array]:
    """For each of `places`, `x` of the token so many places later; anything where the sequence has none.

    `places` are one, or all <= 0: what the ring sends goes one way.
    """
    rank = axes.coordinate(ring.names)
    if ring.layout == "striped" or ring.ranks == 1 or not any(places):
        found = []
        for place in places:
            rows, ranks = divmod(place, ring.ranks)
            sent = axes.permuted(x, ring.names, axes.pairs_of_shift(ring.ranks, -ranks)) if ranks else x
            near, next_row = jnp.roll(sent, -rows, 1), jnp.roll(sent, -rows - 1, 1)
            found.append(jnp.where(rank + ranks >= ring.ranks, next_row, near) if ranks else near)
        return found
    width, later = max(map(abs, places)), max(places) > 0
    runs = jnp.split(x, pieces(ring.layout), 1)
    length = runs[0].shape[1]
    edges = [jax.lax.slice_in_dim(run, *((0, width) if later else (length - width, length)), axis=1) for run in runs]
    borders = []
    for number, edge in enumerate(edges):  # in zigzag order, the second runs of the ranks go down
        step = 1 if later == bool(number) else -1
        borders.append(axes.permuted(edge, ring.names, axes.pairs_of_shift(ring.ranks, step)))
    if ring.layout == "zigzag":  # the two runs of the last rank follow one another
        middle = 0 if later else 1
        borders[middle] = jnp.where(rank == ring.ranks - 1, edges[1 - middle], borders[middle])
    joined = [jnp.concatenate(pair if later else pair[::-1], 1) for pair in zip(runs, borders, strict=True)]
    starts = [place if later else width + place for place in places]
    return [
        jnp.concatenate([jax.lax.slice_in_dim(run, start, start + length, axis=1) for run in joined], 1)
        for start in starts
    ]


def _write(ring: TokenRing, held: jax.Array, x: jax.Array, at: jax.Array) -> jax.Array:
    """The work of `write_cache` on one rank's shard of a cache."""
    length = held.shape[1]
    rank, slot = Shards(ring.layout, ring.ranks).place_of(at, length)
    own = (rank == axes.coordinate(ring.names)) & (at >= 0) & (at < ring.ranks * length)
    slots, x = jnp.where(own, slot, length), axes.shared(x, ring.names)  # beyond the shard: dropped
    return jax.vmap(lambda row, new, slot: row.at[slot].set(new, mode="drop"))(held, x.astype(held.dtype), slots)
