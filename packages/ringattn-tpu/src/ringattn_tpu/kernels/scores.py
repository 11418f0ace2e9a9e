# SPDX-License-Identifier: Apache-2.0
"""The scores of a tile in every kernel: their values, and which pairs of query and key are masked out.

A kernel keeps a tile of one side, queries or keys (`by_keys`), along the sublanes. Tiles of the other side visit it,
along the lanes. Scores and logarithms are in units of log2.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from ringattn_core.contract.bits import WORD
from ringattn_core.contract.visibility import with_forbidden
from ringattn_core.masks import all_of

from ..block_sizes import LANES
from ..kernel_inputs import LOG2_E, Settings
from ..launch import Step
from ..mask_bits import bits


def to_column(row: jax.Array) -> jax.Array:
    """Turns a row `[1, tile]` into a column `[tile, 128]`: entry `i` of the row fills the lanes of row `i`."""
    return jnp.transpose(jnp.broadcast_to(row, (LANES, row.shape[1])))


def to_row(column: jax.Array) -> jax.Array:
    """Turns a column `[tile, 128]` whose lanes are all equal into a row `[1, tile]`."""
    return jnp.transpose(column)[:1]


def to_width(column: jax.Array, width: int) -> jax.Array:
    """Widens or narrows `column [tile, 128]`, in which the lanes of a row are equal, to `[tile, width]`."""
    if width < LANES:
        return column[:, :width]
    return jnp.tile(column, (1, -(-width // LANES)))[:, :width]


def folded(x: jax.Array) -> jax.Array:
    """Adds up the groups of 128 lanes of `x [tile, width]`, to `[tile, 128]`."""
    total = x[:, :LANES]
    for start in range(LANES, x.shape[1], LANES):
        total = total + x[:, start : start + LANES]
    return total


class Part(NamedTuple):
    """What a kernel computes at a time: the tile that it keeps, and `width` tokens of a visiting tile, from `start` on.

    `by_keys`: the kernel keeps keys. `columns`: the integers of the kept tile (positions, indices, ids), as columns.
    """

    settings: Settings
    step: Step
    inputs: Any
    columns: Any
    by_keys: bool
    start: int
    width: int

    @property
    def height(self) -> int:
        return self.inputs["k" if self.by_keys else "q"].shape[0]

    @property
    def lanes(self) -> Any:
        return slice(self.start, self.start + self.width)

    def rows(self, name: str) -> jax.Array:
        """The rows of `q`, `dout`, `k` or `v` in this part: the whole kept tile, or `width` of the visiting rows."""
        visiting = (name in ("q", "dout")) == self.by_keys
        return self.inputs[name][self.lanes if visiting else slice(None), :]

    def of_query(self, name: str) -> jax.Array:
        """The integer `name` of each query, such as "position", along the query axis of the scores."""
        return self._integer(self.settings.q_rows.index(name), "q_integers", not self.by_keys)

    def of_key(self, name: str) -> jax.Array:
        """The integer `name` of each key, such as "position", along the key axis of the scores."""
        return self._integer(self.settings.kv_rows.index(name), "kv_integers", self.by_keys)

    def _integer(self, row: int, name: str, own: bool) -> jax.Array:
        return to_width(self.columns[row], self.width) if own else self.inputs[name][row : row + 1, self.lanes]


def keep_columns(rows: Any, columns: Any) -> None:
    """Turns each of `rows [n, tile]` into a column, and stores it in `columns`; does nothing if `columns` is `None`."""
    if columns is None:
        return
    for row in range(columns.shape[0]):
        columns[row] = to_column(rows[row : row + 1, :])


def matmul(a: jax.Array, b: jax.Array, settings: Settings) -> jax.Array:
    """`a @ b`, accumulated in float32."""
    return jnp.dot(a.astype(b.dtype), b, precision=settings.precision, preferred_element_type=jnp.float32)


def products(part: Part, of_query: str, of_key: str) -> jax.Array:
    """The dot products of each query's row of array `of_query` with each key's row of `of_key`, laid out as scores."""
    q, k = part.rows(of_query), part.rows(of_key)
    own, visiting = (k, q) if part.by_keys else (q, k)
    return jax.lax.dot_general(
        own,
        visiting,
        (((1,), (1,)), ((), ())),
        precision=part.settings.precision,
        preferred_element_type=jnp.float32,
    )


def scores(part: Part, scaled: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The scores before any mask, in units of log2, and `tanh` of the soft cap (without one, `scaled`).

    `scaled` are the products of queries and keys, times `product_scale`.
    """
    s, bent, cap = scaled, scaled, part.settings.rule.logits_soft_cap
    if cap is not None:
        bent = jnp.tanh(scaled)
        s = bent * (cap * LOG2_E)
    if "bias" in part.inputs:
        s = s + with_forbidden(_bias(part)) * LOG2_E
    if "distance_weight" in part.inputs:
        s = s - part.inputs["distance_weight"][...] * distance(part)
    return s, bent


def mask_out(part: Part, x: jax.Array) -> jax.Array:
    """`x`, with -inf where the query does not see the key."""
    seen = _visible(part)
    return x if seen is None else jnp.where(seen, x, -jnp.inf)


def _bias(part: Part) -> jax.Array:
    bias = part.inputs["bias"]
    if not part.by_keys:
        return bias[:, part.lanes].astype(jnp.float32)
    if bias.shape[0] > 1:
        return jnp.transpose(bias[part.lanes, :].astype(jnp.float32))
    return to_width(to_column(bias[...].astype(jnp.float32)), part.width)


def distance(part: Part) -> jax.Array:
    """`|i - j|` for the positions `i` of each query and `j` of each key, in float32."""
    return jnp.abs(part.of_query("position") - part.of_key("position")).astype(jnp.float32)


def _visible(part: Part) -> jax.Array | None:
    """Which queries see which keys of the part; `None` if the kernel reads no masks, so that all see all."""
    rows, parts = part.settings.q_rows, []
    alike = part.of_query("segment") == part.of_key("segment") if "segment" in rows else None
    if "span" in rows:
        after = part.of_key("position") - part.of_query("first")
        parts.append(_unsigned(after) <= _unsigned(part.of_query("span")))
    elif "last" in rows:
        last = part.of_query("last")
        if alike is not None:
            # One condition: for two, libtpu 0.0.50.1 schedules 18% more bundles in the forward pass on v6e.
            last, alike = jnp.where(alike, last, np.int32(-(2**31))), None
        parts.append(part.of_key("position") <= last)
    elif "first" in rows:
        parts.append(part.of_key("position") >= part.of_query("first"))
    if alike is not None:
        parts.append(alike)
    if "mask_bits" in part.inputs:
        parts.append(_of_bits(part))
    if "mask_words" in part.inputs:
        parts.append(_of_blocks_by_rows(part) if part.by_keys else _of_blocks_by_lanes(part))
    return all_of(parts)


def _unsigned(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)


def _of_blocks_by_lanes(part: Part) -> jax.Array:
    """Whether each query of the kept tile has chosen the block of each key of the part, 128 keys at a time."""
    grain, found = part.settings.grain, []
    lane = jax.lax.broadcasted_iota(jnp.int32, (part.height, LANES), 1)
    for start in range(part.start, part.start + part.width, LANES):
        word, bit = divmod(start // grain, WORD)
        column = to_column(part.inputs["mask_words"][0, word : word + 1, :])
        place = bit if grain % LANES == 0 else jax.lax.div(lane + start % grain, jnp.int32(grain)) + bit
        found.append((jax.lax.shift_right_logical(column, jnp.broadcast_to(jnp.int32(place), lane.shape)) & 1) != 0)
    return jnp.concatenate(found, 1)


def _of_blocks_by_rows(part: Part) -> jax.Array:
    """Whether each query of the part has chosen the block of each key of the kept tile, a word at a time."""
    grain, found = part.settings.grain, []
    for word, start in enumerate(range(0, part.height, WORD * grain)):
        rows = min(WORD * grain, part.height - start)
        words = jnp.broadcast_to(part.inputs["mask_words"][0, word : word + 1, part.lanes], (rows, part.width))
        place = jax.lax.div(jax.lax.broadcasted_iota(jnp.int32, words.shape, 0), jnp.int32(grain))
        found.append((jax.lax.shift_right_logical(words, place) & 1) != 0)
    return jnp.concatenate(found, 0)


def _of_bits(part: Part) -> jax.Array:
    packed = part.inputs["mask_bits"][:, part.lanes]
    count = bits(part.height)
    row = jax.lax.broadcasted_iota(jnp.int32, (1, count, 1), 1)
    return ((jax.lax.shift_right_logical(packed[:, None, :], row) & 1) != 0).reshape(part.height, part.width)
