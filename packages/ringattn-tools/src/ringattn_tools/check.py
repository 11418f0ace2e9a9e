# SPDX-License-Identifier: Apache-2.0
"""`RINGATTN_CHECK=1`: finds, when a program runs, mistakes that a call cannot see when it is traced.

Each finding is computed on the devices, and the ranks agree on it. A host callback then raises on every rank, so that
none waits for another. Queries, keys and values wait for the callback, so none of them travels before it. A mistake is
reported only if no other reading of the arrays is likely: what a check cannot decide passes.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from ringattn_core.call.entry import callers_line, warn
from ringattn_core.call.validation import CHECK
from ringattn_core.contract.call import ARRAYS, Call
from ringattn_core.contract.protocol import BIAS_FORBIDS
from ringattn_core.contract.varying import align
from ringattn_core.contract.visibility import visible
from ringattn_core.errors import InputError
from ringattn_core.masks import Reach
from ringattn_core.placement import axes
from ringattn_core.placement.arrays import Roles, broadcasts, letters
from ringattn_core.placement.layout import LAYOUTS, Shards, pieces
from ringattn_core.ring.blocks import block_of, queries_of
from ringattn_core.ring.engine import ring_of
from ringattn_core.ring.key_ids import with_all_ids
from ringattn_core.ring.kv import KV

LIKE_A_COUNT: Final = 128
"""A window of a power of two keys, from this one on, looks like a count of keys."""
_PAIRS: Final = 2**26
"""How many pairs of a query and a key are looked at in one step."""

Fits = Callable[[jax.Array, np.ndarray], jax.Array]
"""Whether values `[b, tokens]` look as if their tokens, of these indices, are in natural order."""


@dataclasses.dataclass(frozen=True)
class Finding:
    """What a check found: `numbers` on the device, the first of them 0 if nothing is wrong, and the error that says it.

    The `numbers` are equal on all ranks that the call names.
    """

    numbers: tuple[jax.Array, ...]
    error: Callable[..., InputError]


@dataclasses.dataclass(frozen=True)
class Check:
    """Checks the calls of one `line` of the caller's program.

    `of_cache` says that keys and values are a cache; `local`, that a `shard_map` of the caller splits the arrays.
    """

    line: str
    of_cache: bool
    local: bool

    @functools.partial(jax.jit, static_argnums=0)
    def __call__(self, call: Call) -> Call:
        """The call of a rank, to run only after all checks; where one fails, the program raises."""
        left = [name for name in jax.sharding.get_abstract_mesh().axis_names if name not in axes.manual()]
        if left and axes.manual():  # JAX would refuse to lower the callback
            warn(
                f"{CHECK}=1 cannot look at the call in {self.line}: JAX has no callbacks in a shard_map that "
                f"leaves mesh axes automatic, here {', '.join(left)}. Make them manual for the check"
            )
            return dataclasses.replace(call, check=None, check_positions=None)
        rank = _Rank.of(jax.lax.stop_gradient(call), self)
        findings = [finding for check in CHECKS for finding in check(rank)]
        call = dataclasses.replace(call, check=None, check_positions=None)
        if not findings:
            return call

        def report(numbers: list[tuple[np.ndarray, ...]]) -> np.ndarray:
            for finding, found in zip(findings, numbers, strict=True):
                for given in zip(*(np.asarray(x).ravel().tolist() for x in found), strict=True):
                    if given[0]:
                        error = finding.error(*given)
                        remedy = f"{error.remedy} ({CHECK}=1 looked at the call in {self.line})"
                        raise InputError(error.argument, error.fact, remedy)
            return np.ones(np.shape(numbers[0][0]), bool)

        wanted, numbers = jax.ShapeDtypeStruct((), jnp.bool_), [finding.numbers for finding in findings]
        fine: Any = jax.pure_callback(report, wanted, numbers, vmap_method="broadcast_all")
        names = ("query", "key", "value", "latents")
        waiting = {name: jax.tree.map(lambda x: jnp.where(fine, x, 0), getattr(call, name)) for name in names}
        return dataclasses.replace(call, **waiting)


def watched(call: Call, of_cache: bool, local: bool) -> Call:
    """The call, to be checked on each rank when the program runs. Warns of a window that looks like a count of keys."""
    left = call.reach.left
    if left is not None and left >= LIKE_A_COUNT and not left & (left - 1):
        warn(
            f"sliding_window: {left} lets a query see {left + 1} keys to its left, itself included. If the model's "
            f"window counts {left} keys, pass {left - 1}"
        )
    line = callers_line()
    return dataclasses.replace(call, check=Check(f"{line.file}:{line.number}", of_cache, local))


@dataclasses.dataclass(frozen=True)
class _Rank:
    """The call of this rank, and the mesh axes that split its arrays."""

    call: Call
    of_cache: bool
    local: bool
    roles: Roles
    ranks: int

    @classmethod
    def of(cls, call: Call, check: Check) -> "_Rank":
        roles = call.placement.roles
        return cls(call, check.of_cache, check.local, roles, axes.size(roles.sequence))

    @property
    def whole_queries(self) -> bool:
        """Whether every rank has all queries, as in `decode_attention`."""
        return self.of_cache and self.call.query_offset is None

    def may_split(self, name: str, x: jax.Array) -> set[str]:
        """The mesh axes that may split the array `x` of this name."""
        whole = self.whole_queries and name in ("query", "q_positions")
        roles = dataclasses.replace(self.roles, sequence=()) if whole else self.roles
        full = {**dict(zip("BTN", self.call.query.shape, strict=False)), "GROUPS": self.call.query.shape[2]}
        named = zip(letters(ARRAYS[name], x.ndim), x.shape, strict=True)
        # An axis of length 1 is broadcast, unless a rank has only one query, head or row anyway.
        of = [a for a, size in named if not (broadcasts(a) and size == 1 < full.get(a.upper(), 1))]
        return {over for letter in of for over in roles.of(letter)}

    def agreed(self, *numbers: Any) -> tuple[jax.Array, ...]:
        """The largest of each number on all ranks."""
        named = (*self.roles.batch, *self.roles.sequence, *self.roles.heads)
        found = [jnp.asarray(x, jnp.int32) for x in numbers]
        return tuple(jax.lax.pmax(_varied(x, named), named) for x in found) if named else tuple(found)

    def whole(self, x: jax.Array) -> jax.Array:
        """An array with a last axis of tokens, `[b, S]`: the tokens of all ranks, in the order in which they are."""
        ring = self.roles.sequence
        x = jnp.atleast_2d(x)
        if not ring:
            return x
        return axes.all_gathered(_varied(x, ring), ring, self.ranks, axes.coordinate(ring), x.ndim - 1)

    def layouts(self, length: int) -> list[str]:
        """The layouts in which the ring can split a sequence of `length`."""
        return [layout for layout in LAYOUTS if length % (self.ranks * pieces(layout)) == 0]

    def order(self, length: int, layout: str | None = None) -> np.ndarray:
        """The index of each token in the order of the layout, by default that of the call."""
        return Shards(layout or self.call.placement.layout, self.ranks).order(length)


def _varied(x: jax.Array, names: tuple[str, ...]) -> jax.Array:
    return align(x, axes.tracked() & {*names})


def _of_next(x: jax.Array, names: tuple[str, ...]) -> tuple[jax.Array, jax.Array]:
    """`x`, and the `x` of the next rank along the mesh axes of these names."""
    ranks, x = axes.size(names), _varied(x, names)
    return x, axes.permuted(x, names, [(rank, (rank - 1) % ranks) for rank in range(ranks)])


def _indices(rank: _Rank) -> Iterator[Finding]:
    """`check_positions` are what the layout and the ring say."""
    given, layout = rank.call.check_positions, rank.call.placement.layout
    if given is None:
        return
    given = rank.whole(given)
    order = rank.order(given.shape[1])
    wrong = (given >= 0) & (given != order[None])
    left = jnp.where(wrong.any(0), len(order) - np.arange(len(order)), 0)  # the first wrong token has the largest
    (left,) = rank.agreed(left.max())
    value = jnp.where(wrong, given, -1).max(0)[jnp.where(left > 0, len(order) - left, 0)]
    number = _layout_of(rank, given, lambda x, index: jnp.all((x < 0) | (x == index[None])))

    def error(left: int, value: int, number: int) -> InputError:
        entry = len(order) - left
        place, token = divmod(entry, len(order) // rank.ranks)
        here = f"token {token} of rank {place} has index {value}"
        fact = f"{here}, but {layout!r} on {rank.ranks} ranks has {order[entry]} there"
        return InputError("check_positions", fact, _remedy(rank, number))

    yield Finding((left, *rank.agreed(value), number), error)


def _orders(rank: _Rank) -> Iterator[Finding]:
    """Segment ids, positions and rows of a mask are in the order of the layout, as far as their values show it."""
    call = rank.call
    # In contiguous order, positions of the caller's own may say in which order the tokens are, and a call that compares
    # no positions need not know it.
    ordered = call.placement.layout != "contiguous"
    looks: list[tuple[str, Any, Fits]] = []
    if ordered or (call.natural and call.reach != Reach()):
        documents = functools.partial(_documents, ranks=rank.ranks)
        looks += [(name, getattr(call, name), documents) for name in ("q_segment_ids", "kv_segment_ids")]
    if ordered and not rank.of_cache:
        looks += [(name, getattr(call, name), _counting) for name in ("q_positions", "kv_positions")]
    for name in ("attention_mask", "bias"):
        x = getattr(call, name)
        if x is not None and x.shape[3] == x.shape[2] * rank.ranks:
            sees = x if name == "attention_mask" else x >= BIAS_FORBIDS
            last = jnp.where(sees, jax.lax.broadcasted_iota(jnp.int32, x.shape, 3), -1).max((1, 3))
            looks.append((name, last, _causal))
    if call.kv_first is not None and call.kv_last is not None and call.natural and not rank.whole_queries:
        ends = jnp.concatenate([call.kv_first.max(1), call.kv_last.min(1)])
        looks.append(("kv_range", ends, _around_own))
    if call.selected is not None and call.reach.causal and call.natural:
        size = call.selected_size
        newest = call.selected.max((2, 3)).clip(-1, (rank.ranks * call.key.shape[1] - 1) // size) * size
        looks += [] if rank.whole_queries else [("selected", newest, _none_later)]
    for name, x, fits in looks:
        if x is None or rank.ranks == 1:
            continue
        number = _layout_of(rank, rank.whole(x), fits, LENIENT.get(name, fits))

        def error(_: int, number: int, name: str = name) -> InputError:
            fact = f"its values are in the order of {LAYOUTS[number]!r}, but the call says {call.placement.layout!r}"
            return InputError(name, fact, _remedy(rank, number))

        wrong = (number != LAYOUTS.index(call.placement.layout)) & (number < len(LAYOUTS))
        yield Finding((wrong.astype(jnp.int32), number), error)


def _remedy(rank: _Rank, number: int) -> str:
    """What to do about tokens in another order than the call's; `number` is as in `_layout_of`."""
    found, wanted = LAYOUTS[number : number + 1], rank.call.placement.layout
    if wanted == "contiguous":
        remedy = "Pass every array of tokens in natural order"
    else:
        remedy = f"Reorder every array of tokens by to_layout(x, {wanted!r}, {rank.ranks})"
    return f"{remedy}, or pass layout={found[0]!r}" if found else remedy


def _layout_of(rank: _Rank, x: jax.Array, fits: Fits, fits_call: Fits | None = None) -> jax.Array:
    """The number in `LAYOUTS` of the layout in which `x [b, tokens]` is: the call's if its values fit, else another.

    `len(LAYOUTS)` if the values fit no layout. `fits_call`, by default `fits`, is asked about the call's own layout.
    """
    length = x.shape[1]
    number = jnp.int32(len(LAYOUTS))
    for layout in sorted(rank.layouts(length), key=lambda layout: layout == rank.call.placement.layout):
        natural = x[:, np.argsort(rank.order(length, layout))]
        asked = fits_call if fits_call is not None and layout == rank.call.placement.layout else fits
        (misfits,) = rank.agreed(~asked(natural, np.arange(length, dtype=np.int32)))
        number = jnp.where(misfits, number, LAYOUTS.index(layout))
    return number


def _before(ids: jax.Array) -> jax.Array:
    """For each token, the id of the nearest earlier token that is not padding; -1 if there is none."""
    at = jax.lax.cummax(jnp.where(ids >= 0, jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1), -1), axis=1)
    before = jnp.pad(at, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    return jnp.where(before < 0, -1, jnp.take_along_axis(ids, before.clip(0), 1))


def _documents(ids: jax.Array, index: np.ndarray, ranks: int) -> jax.Array:
    """Whether ids only go up, as those of packed documents, and change elsewhere than between halves of shards.

    Ids that change only there show nothing: layouts move their runs as a whole, and any order of them may be meant.
    """
    shard = len(index) // ranks
    run = shard // (2 - shard % 2)
    before = _before(ids)
    changes = (ids >= 0) & (before >= 0) & (ids != before)
    return jnp.all(~changes | (ids > before)) & (changes & (index % run > 0)[None]).any()


def _few_returns(ids: jax.Array, _: np.ndarray) -> jax.Array:
    """Whether at most one id returns after another one, in each row. Equal ids may stand wherever they like."""
    real, before = ids >= 0, _before(ids)
    runs = (real & (ids != before)).sum(1)
    by_id = jnp.sort(jnp.where(real, ids, -1), 1)
    different = (by_id[:, 1:] != by_id[:, :-1]).sum(1) + (by_id[:, 0] >= 0).astype(jnp.int32)
    return jnp.all(runs <= different + 1)


def _counting(x: jax.Array, _: np.ndarray) -> jax.Array:
    """Whether positions count up by one, perhaps anew for each document."""
    later = x[:, 1:]
    return jnp.all((later == x[:, :-1] + 1) | (later <= 0) | (later == x[:, :1]))


def _causal(last: jax.Array, index: np.ndarray) -> jax.Array:
    """Whether the last key that a query sees is its own, for every query that sees any, which half of them do."""
    return jnp.all((last == index[None]) | (last < 0)) & (2 * (last >= 0).sum() >= last.size)


def _around_own(ends: jax.Array, index: np.ndarray) -> jax.Array:
    """Whether every range contains the index of its query, unless it is empty.

    The first half of the rows of `ends` are the firsts, the other half the lasts.
    """
    first, last = jnp.split(ends, 2)
    return jnp.all(((first <= index[None]) & (index[None] <= last)) | (first > last))


def _mostly_around_own(ends: jax.Array, index: np.ndarray) -> jax.Array:
    """Whether at least half of the ranges that are not empty contain the index of their query."""
    first, last = jnp.split(ends, 2)
    own = (first <= index[None]) & (index[None] <= last)
    return 2 * own.sum() >= (first <= last).sum()


def _none_later(newest: jax.Array, index: np.ndarray) -> jax.Array:
    """Whether no query of a causal call chooses a block that begins after it; `newest` is where its last one begins."""
    return jnp.all(newest <= index[None])


def _mostly_none_later(newest: jax.Array, index: np.ndarray) -> jax.Array:
    """The same for at least three of four queries: a causal mask hides the others' later blocks."""
    return 4 * (newest <= index[None]).sum() >= 3 * newest.size


def _choice(rank: _Rank) -> Iterator[Finding]:
    """The ids in `selected` are those of blocks of the sequence, or -1."""
    call = rank.call
    if call.selected is None:
        return
    size, keys = call.selected_size, rank.ranks * call.key.shape[1]
    blocks = -(-keys // size)

    def error(_: int, least: int, most: int) -> InputError:
        fact = f"has ids from {-least} to {most}"
        return InputError(
            "selected", fact, f"Pass ids from 0 to {blocks - 1}, the blocks of {size} of {keys} keys, or -1"
        )

    least, most = rank.agreed(-call.selected.min(), call.selected.max())
    yield Finding((((least > 1) | (most >= blocks)).astype(jnp.int32), least, most), error)


def _split(rank: _Rank) -> Iterator[Finding]:
    """The ring splits tokens, and no mesh axis splits an array that it must not split, in the caller's `shard_map`.

    Under `check_vma=True` JAX knows whether the ring splits tokens. Equal shards are no mistake if each repeats its own
    tokens, as a batch of equal tokens does: they may be equal by their values.
    """
    call, roles = rank.call, rank.roles
    if not rank.local:
        return
    tokens = ({} if rank.whole_queries else {"query": [call.query]}) | {"key": jax.tree.leaves(call.travelling)}
    for name, shards in tokens.items():
        if rank.ranks > 1 and not axes.tracked():
            pairs = [_of_next(x, roles.sequence) for x in shards]
            same = jnp.stack([(mine == other).all() for mine, other in pairs]).all()
            (different,) = rank.agreed(~(same & ~jnp.stack([_repeats(x) for x in shards]).all()))
            other = f", not {roles.heads}" if roles.heads else ""
            remedy = f"Name the mesh axis over which in_specs split the tokens{other}"
            error = InputError("axis_name", f"all ranks of {roles.sequence} hold the same {name}", remedy)
            yield Finding((1 - different,), lambda _, error=error: error)
    for name, x in call.arrays.items():
        operand = name in ("query", "key", "value", "dropout_seed")
        if operand and not (rank.whole_queries and name == "query"):
            continue
        split = rank.may_split(name, x)
        for argument, over in (("axis_name", roles.sequence), ("head_axis_name", roles.heads)):
            if split & {*over} or axes.size(over, argument) == 1:
                continue
            mine, other = _of_next(x, over)
            (found,) = rank.agreed(((mine != other) & (mine == mine)).any())
            fact = f"{name} differs between the ranks of {over}, which must all have the same"
            error = InputError(argument, fact, "Check that each axis name is that of in_specs: two may be swapped")
            yield Finding((found,), lambda _, error=error: error)


def _repeats(x: jax.Array) -> jax.Array:
    """Whether the tokens of a shard `[B, S, ...]` repeat an equal part of it twice or more, such as one token."""
    length = x.shape[1]
    primes = [n for n in range(2, length + 1) if length % n == 0 and all(n % m for m in range(2, n))]
    parts = [(x == jnp.roll(x, length // prime, 1)).all() for prime in primes]
    return jnp.stack([*parts, jnp.bool_(length == 1)]).any()


def _expands_each(rank: _Rank) -> Iterator[Finding]:
    """`expand` computes each token by itself: it gives for two halves of the tokens what it gives for all."""
    call = rank.call
    if call.expand is None or rank.ranks == 1 or call.key.shape[1] < 2:
        return
    expand, params = call.expand, call.expand.narrowed(call.expand_params)
    middle = call.key.shape[1] // 2
    assert call.latents is not None
    parts = [expand([x[:, some] for x in call.latents], params) for some in (slice(middle), slice(middle, None))]
    mixed = [
        abs(whole - jnp.concatenate(pair, 1)).max() > float(jnp.finfo(whole.dtype).eps) ** 0.5 * abs(whole).max()
        for whole, *pair in zip(expand(call.latents, params), *parts, strict=True)
    ]
    fact = "mixes tokens: half of them alone do not give what they give among the others"
    error = InputError("expand", fact, "Compute each token by itself, and pass what depends on others in x")
    yield Finding(rank.agreed(jnp.stack(mixed).any()), lambda _: error)


def _room(rank: _Rank) -> Iterator[Finding]:
    """The `lengths` of a cache do not exceed its room."""
    call, room = rank.call, rank.call.key.shape[1] * rank.ranks
    if not rank.of_cache or call.kv_positions is not None:
        return
    if call.query_offset is None:
        assert call.q_positions is not None
        held = call.q_positions.max() + 1
    else:
        held = call.query_offset.max() + call.query.shape[1] * rank.ranks

    def error(held: int) -> InputError:
        fact = f"says that a row holds {held} tokens, but the cache has room for {room}"
        return InputError("lengths", fact, "Pass at most that, or allocate a larger cache")

    yield Finding(rank.agreed(jnp.where(held > room, held, 0)), error)


def _promise(rank: _Rank) -> Iterator[Finding]:
    """No query sees a key beyond `max_distance`."""
    call = rank.call
    promised_reach = call.placement.max_distance
    if promised_reach == Reach():
        return
    batch, tokens = call.query.shape[:2]
    call = dataclasses.replace(call, expand=None, latents=None, expand_params=None)
    call = call.placed(balance=None, strategy="all_gather")
    ring = ring_of(None, call)
    call = with_all_ids(ring, call)
    length = call.key.shape[1] * rank.ranks
    nothing = jnp.zeros((batch, length, call.key.shape[2], 0), call.key.dtype)
    whole = block_of(ring, call, queries_of(ring, call), KV((nothing, nothing)), 0)
    most = max(1, _PAIRS // (batch * call.query.shape[2] * length))
    rows = next(count for count in range(min(most, tokens), 0, -1) if tokens % count == 0)

    def farthest(start: jax.Array) -> tuple[jax.Array, jax.Array]:
        part = whole.tile(start, rows, 0, length)
        distance = (part.q_index[:, :, None] - part.kv_index[:, None, :])[:, None]
        seen = visible(part)
        seen = jnp.bool_(True) if seen is None else seen
        seen = seen if part.bias is None else seen & (part.bias >= BIAS_FORBIDS)
        return jnp.where(seen, distance, 0).max(), jnp.where(seen, -distance, 0).max()

    sides = jax.lax.map(farthest, jnp.arange(0, tokens, rows, dtype=jnp.int32))
    for side, promised, x in zip(("left", "right"), promised_reach.sides, sides, strict=True):
        if promised is not None:
            yield Finding(rank.agreed(jnp.where(x.max() > promised, x.max(), 0)), _broken(side, promised))


def _broken(side: str, promised: int) -> Callable[[int], InputError]:
    def error(sees: int) -> InputError:
        fact = f"promises {promised} on the {side}, but the masks let a query see a key {sees} tokens away there"
        return InputError("max_distance", fact, f"Pass at least {sees}")

    return error


LENIENT: Final = {
    "q_segment_ids": _few_returns,
    "kv_segment_ids": _few_returns,
    "kv_range": _mostly_around_own,
    "selected": _mostly_none_later,
}
"""Where the values of an array prove little, what they must contradict before the call's own layout counts as wrong."""
CHECKS: Final[tuple[Callable[[_Rank], Iterator[Finding]], ...]] = (
    _split,
    _expands_each,
    _indices,
    _choice,
    _orders,
    _room,
    _promise,
)
"""What is checked, in this order: the first error is raised."""
