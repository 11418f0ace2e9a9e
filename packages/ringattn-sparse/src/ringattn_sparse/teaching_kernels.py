# SPDX-License-Identifier: Apache-2.0
"""The kernels of `teach` on NVIDIA GPUs: the sums of the loss of a tile, and its gradients.

`_measure` and `_differentiate` sum the weights of the attention over the heads of a group in registers.
`_differentiate` writes the gradients by the index scores, from which two smaller kernels compute those of the index
queries and of the index keys.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Float32

from .divergence import Sums, dproducts_of, dscores_of
from .launch import fits, launch, padded
from .scores import Activation, activated
from .tiles import Limits

QUERIES: Final = 64
"""The queries of a tile of a program."""
KEYS: Final = 64
"""The keys of a tile of a program."""
TILES: Final = 4
"""The most tiles of keys of a program of `_measure` and `_differentiate`."""
STAGES: Final = 3
"""Pipeline stages of `_measure` and `_differentiate`."""
STAGES_OF_GRADIENTS: Final = 2
"""Pipeline stages of `_of_queries` and `_of_keys`."""
LAUNCH: Final = Limits(2**26, 4096, QUERIES)
"""Of a launch, which writes as many gradients by index scores: 256 MiB."""


def fit(index_query: jax.Array, query: jax.Array, key: jax.Array, groups: int, activation: Activation) -> bool:
    """Whether the kernels take a call: with 16-bit heads of 16, 32, 64 or 128, a number
    of groups that divides that of the key heads, or the reverse, and `relu` or no activation.
    """
    heads = key.shape[2]
    return fits(activation, index_query, query) and (heads % groups == 0 or groups % heads == 0)


class Shared(NamedTuple):
    """What the kernels of both rounds need to know when they are traced."""

    groups: int
    scale: float
    cap: float | None
    activation: Activation


class Live(NamedTuple):
    """The tiles in which some query sees some key: for each tile of one side, `number` tiles of the other, listed first
    in `order`.
    """

    order: jax.Array
    number: jax.Array

    @classmethod
    def of(cls, some: Bool[Array, "b c mine other"]) -> "Live":
        order = jnp.argsort(~some, axis=-1, stable=True).astype(jnp.int32)
        return cls(order, some.sum(-1, keepdims=True, dtype=jnp.int32))

    def operands(self, group_of: Callable[[Any], Any]) -> list[Any]:
        """`group_of` maps the third coordinate of a program to a group."""
        rows, groups = self.order.shape[:2]

        def index(tile: Any, _: Any, group: Any, row: Any) -> Any:
            return row % rows, group_of(group) % groups, tile, 0

        return [(x, (None, None, None, x.shape[3]), index) for x in self]


def _over(live: Any, part: Any, parts: int, body: Callable[[Any, Any], Any], carry: Any) -> Any:
    """Continues `carry = body(tile, carry)` over every `parts`-th live tile, from `part` on."""
    order, count = live
    steps = (count[0] - part + parts - 1) // parts
    return jax.lax.fori_loop(0, steps, lambda step, carry: body(order[part + step * parts], carry), carry)


class Pairs(NamedTuple):
    """The arrays, then in a kernel the references, from which the pairs of tiles of queries and keys follow."""

    index_query: Any
    weights: Any
    query: Any
    lse: Any
    index_key: Any
    key: Any
    seen: Any

    @classmethod
    def of(cls, queries: Any, index_key: jax.Array, key: jax.Array, seen: jax.Array) -> "Pairs":
        """With padding, `weights` and `lse` by heads, and `lse` of the base 2."""
        index_query, weights, query, lse = (
            padded(queries[name], QUERIES) for name in ("index_query", "weights", "query", "lse")
        )
        weights = weights if weights is None else jnp.swapaxes(weights, 1, 2)
        lse = jnp.swapaxes(lse, 1, 2) * math.log2(math.e)
        seen = padded(padded(seen, QUERIES, axis=2), KEYS, axis=3).astype(jnp.int8)
        seen = jax.lax.optimization_barrier(seen)  # XLA would reduce a constant mask when it compiles, for minutes
        return cls(index_query, weights, query, lse, padded(index_key, KEYS), padded(key, KEYS), seen)

    def operands(self, groups: int) -> list[Any]:
        rows, choices, _, keys = self.seen.shape
        index_heads, dim, heads, size = *self.index_query.shape[2:], *self.query.shape[2:]
        index_keys, key_heads = self.index_key.shape[2], self.key.shape[2]
        return [
            (self.index_query, (None, QUERIES, index_heads // groups, dim), lambda t, _, g, row: (row, t, g, 0)),
            (self.weights, (None, index_heads // groups, QUERIES), lambda t, _, g, row: (row, g, t)),
            (self.query, (None, QUERIES, heads // groups, size), lambda t, _, g, row: (row, t, g, 0)),
            (self.lse, (None, heads // groups, QUERIES), lambda t, _, g, row: (row, g, t)),
            (self.index_key, (None, keys, None, dim), lambda t, _, g, row: (row, 0, g % index_keys, 0)),
            (
                self.key,
                (None, keys, max(key_heads // groups, 1), size),
                lambda t, _, g, row: (row, 0, g // max(groups // key_heads, 1), 0),
            ),
            (self.seen, (None, None, QUERIES, keys), lambda t, _, g, row: (row % rows, g % choices, t, 0)),
        ]

    @property
    def some(self) -> Bool[Array, "b c t s"]:
        """In which tiles some query sees some key."""
        rows, choices, tokens, keys = self.seen.shape
        return self.seen.reshape(rows, choices, tokens // QUERIES, QUERIES, keys // KEYS, KEYS).any((3, 5))

    def computed(self, at: Any, shared: Shared) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Which of these keys the queries of a program see, the index scores, and the weights of the attention."""
        key_heads = self.key.shape[1]
        of_key, log2e = self.query.shape[1] // key_heads, math.log2(math.e)
        scores = weight = jnp.zeros((QUERIES, KEYS), jnp.float32)
        for key_head in range(key_heads):
            keys = self.key[at, key_head, :].T

            def add(head: Any, sums: jax.Array) -> jax.Array:
                s = jnp.dot(self.query[:, head, :], keys, preferred_element_type=jnp.float32)  # noqa: B023
                cap = shared.cap
                s = s * (shared.scale * log2e) if cap is None else cap * log2e * jnp.tanh(s * (shared.scale / cap))
                lse = self.lse[head, :][:, None]
                return sums + jnp.exp2(jnp.where(lse == -jnp.inf, -jnp.inf, s - lse))

            weight = jax.lax.fori_loop(key_head * of_key, (key_head + 1) * of_key, add, weight)
        index_keys = self.index_key[at, :].T

        def add_index(head: Any, sums: jax.Array) -> jax.Array:
            x = jnp.dot(self.index_query[:, head, :], index_keys, preferred_element_type=jnp.float32)
            x = activated(shared.activation, x)
            return sums + (x if self.weights is None else x * self.weights[head, :][:, None])

        scores = jax.lax.fori_loop(0, self.index_query.shape[1], add_index, scores)
        seen = self.seen[:, at] != 0
        return seen, jnp.where(seen, scores, 0.0), jnp.where(seen, weight, 0.0)


def sums_of(
    queries: Any, index_key: Float[Array, "B s g D"], key: Float[Array, "B s K H"], seen: jax.Array, shared: Shared
) -> Sums:
    """The sums `[B, G, t]` over the keys of a tile."""
    pairs, length = Pairs.of(queries, index_key, key, seen), queries["query"].shape[1]
    live, (rows, tokens) = Live.of(pairs.some), pairs.query.shape[:2]
    parts = -(-live.order.shape[3] // TILES)
    found = launch(
        functools.partial(_measure, parts=parts, shared=shared),
        (tokens // QUERIES, parts, shared.groups, rows),
        [*pairs.operands(shared.groups), *live.operands(lambda group: group)],
        [
            (
                ((rows, shared.groups, parts, tokens), jnp.float32),
                (None, None, None, QUERIES),
                lambda tile, part, group, row: (row, group, part, tile),
            )
        ]
        * len(Sums._fields),
        STAGES,
    )
    return functools.reduce(Sums.merged, (Sums(*(x[:, :, part, :length] for x in found)) for part in range(parts)))


def _measure(part: Any, *refs: Any, parts: int, shared: Shared) -> None:
    """The sums over every `parts`-th live tile of keys."""
    pairs, live, results = Pairs(*refs[:7]), refs[7:9], refs[9:]

    def tile(number: Any, sums: Sums) -> Sums:
        return sums.merged(Sums.of(*pairs.computed(_at(number, KEYS), shared)))

    sums = _over(live, part, parts, tile, Sums.of_none(jnp.zeros((QUERIES,), jnp.float32)))
    for result, x in zip(results, sums, strict=True):
        result[...] = x


def gradients_of(
    queries: Any, index_key: Float[Array, "B s g D"], key: Float[Array, "B s K H"], seen: jax.Array, shared: Shared
) -> tuple[Float32[Array, "B t I D"], Float32[Array, "B t I"], Float32[Array, "B s g D"]]:
    """The gradients by the index queries, the weights and the index keys of a tile."""
    pairs, (length, keys), groups = Pairs.of(queries, index_key, key, seen), seen.shape[2:], shared.groups
    (rows, tokens, heads, dim), (_, span, index_keys, _) = pairs.index_query.shape, pairs.index_key.shape
    some, sums = pairs.some, [jnp.swapaxes(padded(queries[name], QUERIES), 1, 2) for name in ("index_lse", "weight")]
    live, of_group = Live.of(some), heads // groups
    parts = -(-live.order.shape[3] // TILES)
    (dscores,) = launch(
        functools.partial(_differentiate, parts=parts, shared=shared),
        (tokens // QUERIES, parts, groups, rows),
        [
            *pairs.operands(groups),
            *live.operands(lambda group: group),
            *((x, (None, None, QUERIES), lambda tile, _, group, row: (row, group, tile)) for x in sums),
        ],
        [
            (
                ((rows, groups, tokens, span), jnp.float32),
                (None, None, QUERIES, span),
                lambda tile, _, group, row: (row, group, tile, 0),
            )
        ],
        STAGES,
    )

    def operands(live: Live, by_queries: bool) -> list[Any]:
        """For a program of each head, and of a tile of queries or keys; of the other side, it gets all."""
        queries, keys = (QUERIES, span) if by_queries else (tokens, KEYS)
        t, s = (int(by_queries), int(not by_queries))
        return [
            *live.operands(lambda head: head // of_group),
            (dscores, (None, None, queries, keys), lambda tile, _, h, row: (row, h // of_group, t * tile, s * tile)),
            (pairs.index_query, (None, queries, None, dim), lambda tile, _, h, row: (row, t * tile, h, 0)),
            (pairs.weights, (None, None, queries), lambda tile, _, h, row: (row, h, t * tile)),
            (
                pairs.index_key,
                (None, keys, None, dim),
                lambda tile, _, h, row: (row, s * tile, h * index_keys // heads, 0),
            ),
        ]

    dquery, dweights = launch(
        functools.partial(_of_queries, activation=shared.activation),
        (tokens // QUERIES, 1, heads, rows),
        operands(live, True),
        [
            (
                (pairs.index_query.shape, jnp.float32),
                (None, QUERIES, None, dim),
                lambda tile, _, head, row: (row, tile, head, 0),
            ),
            (((rows, heads, tokens), jnp.float32), (None, None, QUERIES), lambda tile, _, head, row: (row, head, tile)),
        ],
        STAGES_OF_GRADIENTS,
    )
    (dkey,) = launch(
        functools.partial(_of_keys, activation=shared.activation),
        (span // KEYS, 1, heads, rows),
        operands(Live.of(jnp.swapaxes(some, 2, 3)), False),
        [
            (
                ((rows, heads, span, dim), jnp.float32),
                (None, None, KEYS, dim),
                lambda tile, _, head, row: (row, head, tile, 0),
            )
        ],
        STAGES_OF_GRADIENTS,
    )
    dkey = dkey.reshape(rows, index_keys, -1, span, dim).sum(2)
    return dquery[:, :length], jnp.swapaxes(dweights, 1, 2)[:, :length], jnp.swapaxes(dkey, 1, 2)[:, :keys]


def _differentiate(part: Any, *refs: Any, parts: int, shared: Shared) -> None:
    """The gradients by the index scores of every `parts`-th live tile of keys."""
    pairs, live, (index_lse, total, dscores) = Pairs(*refs[:7]), refs[7:9], refs[9:]

    def tile(number: Any, _: None) -> None:
        at = _at(number, KEYS)
        dscores[:, at] = dscores_of(*pairs.computed(at, shared), index_lse[...], total[...])

    _over(live, part, parts, tile, None)


def _of_queries(
    _: Any,
    order: Any,
    count: Any,
    dscores: Any,
    query: Any,
    weights: Any,
    key: Any,
    dquery: Any,
    dweights: Any,
    *,
    activation: Activation,
) -> None:
    """The gradients of a tile of queries of an index head, and of their weights."""
    q, weight = query[...], None if weights is None else weights[...]

    def tile(number: Any, sums: Any) -> Any:
        at = _at(number, KEYS)
        k = key[at, :]
        dproducts, dweight = _dproducts(activation, q, weight, k, dscores[:, at])
        return sums[0] + _product(dproducts, k), sums[1] + dweight

    start = jnp.zeros(q.shape, jnp.float32), jnp.zeros((QUERIES,), jnp.float32)
    dquery[...], dweights[...] = _over((order, count), 0, 1, tile, start)


def _of_keys(
    _: Any,
    order: Any,
    count: Any,
    dscores: Any,
    query: Any,
    weights: Any,
    key: Any,
    dkey: Any,
    *,
    activation: Activation,
) -> None:
    """The gradients of a tile of keys by one index head."""
    k = key[...]

    def tile(number: Any, sums: jax.Array) -> jax.Array:
        at = _at(number, QUERIES)
        q, weight = query[at, :], None if weights is None else weights[at]
        return sums + _product(_dproducts(activation, q, weight, k, dscores[at, :])[0].T, q)

    dkey[...] = _over((order, count), 0, 1, tile, jnp.zeros(k.shape, jnp.float32))


def _dproducts(activation: Activation, q: Any, weight: Any, k: Any, dscores: Any) -> tuple[jax.Array, jax.Array]:
    x = jnp.dot(q, k.T, preferred_element_type=jnp.float32)
    # Without pairs that are not seen, whose product may be infinite or NaN.
    return dproducts_of(activation, jnp.where(dscores == 0, 0.0, x), dscores, weight, q.dtype)


def _product(dproducts: jax.Array, x: jax.Array) -> jax.Array:
    """`dproducts @ x` in float32. Those in float32 use TF32, with float16's fraction and float32's exponents."""
    if dproducts.dtype == x.dtype:
        return jnp.dot(dproducts, x, preferred_element_type=jnp.float32)
    return jnp.dot(dproducts, x.astype(jnp.float32), precision="high")


def _at(number: Any, size: int) -> Any:
    return pl.ds(number * size, size)
