# SPDX-License-Identifier: Apache-2.0
"""What one tile of scores is in every kernel: its values, which pairs see each other, and which of them are kept.

The own side of a kernel lies along the sublanes and the visiting side along the lanes; which of them are the queries is
all that differs. Scores are in units of log2.
"""

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from ringattn_core.contract.dropout import philox

from ..launch import Step
from ..operands import LOG2_E, Facts
from ..tables import GROUPED
from ..words import bits

LANES: Final = 128
HIDDEN: Final = -0.7 * 3.4028235e38
"""The score of a pair that is not visible: so low that its weight is 0 beside any other."""
START: Final = HIDDEN / 2
"""Where a running maximum begins: above `HIDDEN`, so that rows that have seen nothing give no weight to it."""


def to_column(row: jax.Array) -> jax.Array:
    """A row `[1, tile]` as a column whose every lane is the same, `[tile, 128]`."""
    return jnp.transpose(jnp.broadcast_to(row, (LANES, row.shape[1])))


def to_row(column: jax.Array) -> jax.Array:
    """The inverse of `to_column`."""
    return jnp.transpose(column)[:1]


def wide(column: jax.Array, width: int) -> jax.Array:
    """A column whose every lane is the same, for `width` lanes."""
    if width < LANES:
        return column[:, :width]
    return jnp.tile(column, (1, -(-width // LANES)))[:, :width]


def folded(x: jax.Array) -> jax.Array:
    """The sums of what lies in the same lane, `[tile, 128]`."""
    total = x[:, :LANES]
    for start in range(LANES, x.shape[1], LANES):
        total = total + x[:, start : start + LANES]
    return total


class Part(NamedTuple):
    """Some of a visiting tile, from lane `start`, against all of the own one, whose numbers `columns` holds."""

    facts: Facts
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

    def of_query(self, name: str, width: int | None = None) -> jax.Array:
        """The number of each query along its axis of the scores, for as many lanes where that is the own axis."""
        return self._number(self.facts.q_rows.index(name), "q_numbers", not self.by_keys, width)

    def of_key(self, name: str, width: int | None = None) -> jax.Array:
        """The number of each key along its axis of the scores, for as many lanes where that is the own axis."""
        return self._number(self.facts.kv_rows.index(name), "kv_numbers", self.by_keys, width)

    def _number(self, row: int, name: str, own: bool, width: int | None) -> jax.Array:
        if own:
            return wide(self.columns[row], self.width if width is None else width)
        return self.inputs[name][row : row + 1, self.lanes]


def own_numbers(facts: Facts, by_keys: bool) -> tuple[str, ...]:
    """The rows of numbers that a kernel keeps as columns."""
    return facts.kv_rows if by_keys else facts.q_rows


def keep_columns(facts: Facts, inputs: Any, columns: Any, by_keys: bool) -> None:
    """The numbers of the own tile, turned to columns once for all that visits it."""
    rows = "kv_numbers" if by_keys else "q_numbers"
    for row in range(len(own_numbers(facts, by_keys))):
        columns[row] = to_column(inputs[rows][row : row + 1, :])


def outer(a: jax.Array, b: jax.Array, facts: Facts) -> jax.Array:
    """The product of each row of `a` with each of `b`."""
    return jax.lax.dot_general(
        a, b, (((1,), (1,)), ((), ())), precision=facts.precision, preferred_element_type=jnp.float32
    )


def bent(part: Part, product: jax.Array) -> jax.Array:
    """The hyperbolic tangent that the soft cap takes of a product, or the scaled product itself."""
    product = product * part.facts.bend
    return jnp.tanh(product) if part.facts.capped else product


def scored(part: Part, bend: jax.Array) -> jax.Array:
    """The scores from `bent`."""
    facts, inputs = part.facts, part.inputs
    s = bend * facts.unbend if facts.capped else bend
    if facts.bias:
        s = s + _bias(part) * LOG2_E
    if facts.slopes:
        s = s - inputs["slopes"][...] * LOG2_E * distance(part)
    return s


def _bias(part: Part) -> jax.Array:
    bias = part.inputs["bias"]
    if not part.by_keys:
        return bias[:, part.lanes].astype(jnp.float32)
    if part.facts.bias_rows:
        return jnp.transpose(bias[part.lanes, :].astype(jnp.float32))
    return wide(to_column(bias[...].astype(jnp.float32)), part.width)


def distance(part: Part) -> jax.Array:
    """How far apart the positions of each pair are."""
    return jnp.abs(part.of_query("position") - part.of_key("position")).astype(jnp.float32)


def visible(part: Part) -> jax.Array | None:
    """Which pairs see each other; `None` where all do."""
    facts = part.facts
    parts = []
    if facts.above:
        parts.append(part.of_key("position") <= part.of_query("high"))
    if facts.below:
        parts.append(part.of_key("position") >= part.of_query("low"))
    if facts.segments:
        parts.append(part.of_query("segment") == part.of_key("segment"))
    if facts.words:
        parts.append(_bits(part))
    if not parts:
        return None
    seen = parts[0]
    for one in parts[1:]:
        seen = seen & one
    return seen


def _bits(part: Part) -> jax.Array:
    words = part.inputs["words"][:, part.lanes]
    count = bits(part.height)
    row = jax.lax.broadcasted_iota(jnp.int32, (1, count, 1), 1)
    return ((jax.lax.shift_right_logical(words[:, None, :], row) & 1) != 0).reshape(part.height, part.width)


def selected(seen: jax.Array | None, x: jax.Array, other: float) -> jax.Array:
    """`x`, and `other` where a pair does not see each other; `seen` is `visible`."""
    return x if seen is None else jnp.where(seen, x, other)


def kept(part: Part, weight: float) -> jax.Array:
    """`weight` for the probabilities that survive dropout and 0 for the others: those of core's `dropout.kept`."""
    keep = jax.lax.cond(part.step.has(GROUPED), lambda: _by_groups(part), lambda: _one_by_one(part))
    return jnp.where(keep != 0, weight, 0.0)


def _one_by_one(part: Part) -> jax.Array:
    """1 where a pair is kept; every key draws for itself."""
    key = jnp.broadcast_to(_unsigned(part.of_key("index")), (part.height, part.width))
    words = _drawn(part, key >> 2, _unsigned(part.of_query("index")))
    low, high = jnp.where(key & 3 == 0, words[0], words[1]), jnp.where(key & 3 == 2, words[2], words[3])
    return _survives(part, jnp.where(key & 3 < 2, low, high)).astype(jnp.int32)


def _by_groups(part: Part) -> jax.Array:
    """The same where four keys share a draw. Products with ones and zeros spread the draws over the keys."""
    axis = 0 if part.by_keys else 1
    keys = part.height if part.by_keys else part.width
    groups = keys // 4
    first = part.of_key("index", LANES)[:1, :1]
    group = jax.lax.broadcasted_iota(jnp.int32, _along(axis, groups), axis) + (first >> 2)
    words = _drawn(part, _unsigned(group), _unsigned(part.of_query("index", groups)))
    draws = sum(jnp.where(_survives(part, word), float(1 << bit), 0.0) for bit, word in enumerate(words))
    draws = jnp.asarray(draws).astype(jnp.bfloat16)
    key, of_group = (jax.lax.broadcasted_iota(jnp.int32, (keys, groups), a) for a in (0, 1))
    spread = jnp.where(key >> 2 == of_group, 1.0, 0.0).astype(jnp.bfloat16)
    if part.by_keys:
        number = jnp.dot(spread, draws, preferred_element_type=jnp.float32)
    else:
        number = jax.lax.dot_general(draws, spread, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    place = jax.lax.broadcasted_iota(jnp.int32, _along(axis, keys), axis) & 3
    return jax.lax.shift_right_logical(number.astype(jnp.int32), jnp.broadcast_to(place, number.shape)) & 1


def _drawn(part: Part, group: jax.Array, query: jax.Array) -> tuple[jax.Array, ...]:
    """The four words of each group of keys for each query."""
    head, batch, seed = (_unsigned(part.inputs[name][...]) for name in ("head_index", "batch_index", "seed"))
    shape = jnp.broadcast_shapes(group.shape, query.shape)
    a, b, c, d = (jnp.broadcast_to(x, shape) for x in (group, query, head, batch))
    return philox((a, b, c, d), (seed, jnp.uint32(0)))


def _survives(part: Part, word: jax.Array) -> jax.Array:
    # Unsigned numbers compare as signed ones whose highest bit is flipped.
    flipped = jax.lax.bitcast_convert_type(word ^ jnp.uint32(2**31), jnp.int32)
    return flipped >= part.facts.threshold - 2**31


def _along(axis: int, size: int) -> tuple[int, int]:
    return (size, 1) if axis == 0 else (1, size)


def _unsigned(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, jnp.uint32)
