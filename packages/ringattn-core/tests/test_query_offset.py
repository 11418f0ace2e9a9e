# SPDX-License-Identifier: Apache-2.0
"""`query_offset` places queries in a longer sequence: results are those of a call with positions."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from ringattn_core import masks, ring_attention
from ringattn_core.call import sharding
from ringattn_core.call.validation import validated
from ringattn_core.errors import InputError
from ringattn_testing.rings import close, drawn, graded, in_order_of, mesh_of

B, T, S, N, K, H = 2, 24, 48, 4, 2, 8
OPERANDS = QUERY, KEY, VALUE = drawn((B, T, N, H), (B, S, K, H), (B, S, K, H))
SLOPES = jnp.linspace(0.1, 0.5, N)
OFFSETS = np.array([9, 24])
MANY: dict[str, Any] = {"causal": True, "sliding_window": (13, 0), "alibi_slopes": SLOPES}


def by_positions(offset: Any, *operands: jax.Array, **options: Any) -> jax.Array:
    """The call on one device whose queries have these positions, not an offset."""
    positions = {"q_positions": np.asarray(offset)[..., None] + np.arange(T), "kv_positions": np.arange(S)}
    return ring_attention(*operands, **positions, **options)


@pytest.mark.parametrize(
    ("strategy", "layout", "kind"),
    [
        ("ring", "striped", AxisType.Auto),
        ("all_gather", "zigzag", AxisType.Explicit),
        ("ulysses", "striped", AxisType.Explicit),
    ],
)
def test_every_strategy_places_the_queries_alike_over_two_axes_with_the_batch_split(
    strategy: str, layout: str, kind: AxisType
) -> None:
    mesh = mesh_of(kind, dp=2, inner=2, outer=2)
    over: dict[str, Any] = {"mesh": mesh, "axis_name": ("outer", "inner"), "strategy": strategy, "layout": layout}

    @jax.jit
    def found(offset: Any) -> Any:
        def attend(slopes: Any, *operands: Any) -> Any:
            options = over | MANY | {"alibi_slopes": slopes, "query_offset": offset}
            return in_order_of(layout, 4, functools.partial(ring_attention, **options))(*operands)

        return graded(attend, SLOPES, *OPERANDS)

    def wanted(slopes: Any, *operands: Any) -> Any:
        return by_positions(OFFSETS, *operands, **MANY | {"alibi_slopes": slopes})

    close(found(OFFSETS), graded(wanted, SLOPES, *OPERANDS), 5e-5)


def test_a_two_sided_window_counts_from_the_offset() -> None:
    """Without an offset, the window would leave out hops that these queries need."""
    got = ring_attention(QUERY, KEY, VALUE, query_offset=24, mesh=mesh_of(sp=8), axis_name="sp", sliding_window=2)
    close(got, by_positions(24, *OPERANDS, sliding_window=2))


def test_predicates_see_the_position_and_dropout_sees_the_index() -> None:
    even = masks.Predicate(lambda i, j: (i - j) % 2 == 0)
    got = ring_attention(QUERY, KEY, VALUE, query_offset=3, mask_builder=lambda *_: even)
    close(got, by_positions(3, *OPERANDS, mask_builder=lambda *_: even))
    got = ring_attention(QUERY, KEY, VALUE, query_offset=3, dropout_prob=0.3, dropout_seed=5)
    close(got, ring_attention(*OPERANDS, dropout_prob=0.3, dropout_seed=5))


def test_keys_may_have_positions_of_their_own() -> None:
    where = jnp.arange(S)[::-1]
    got = ring_attention(QUERY, KEY, VALUE, causal=True, query_offset=20, kv_positions=where)
    wanted = ring_attention(QUERY, KEY[:, ::-1], VALUE[:, ::-1], causal=True, query_offset=20)
    close(got, wanted)
    square = validated(QUERY, KEY[:, :T], VALUE[:, :T], query_offset=20, kv_positions=where[:T])
    assert square.q_positions is None and not square.natural


def test_a_vmapped_offset_is_that_of_each_example() -> None:
    offsets = jnp.array([0, 5])
    over: dict[str, Any] = {"causal": True, "mesh": mesh_of(sp=2), "axis_name": "sp"}
    got = jax.vmap(lambda offset: ring_attention(QUERY, KEY, VALUE, query_offset=offset, **over))(offsets)
    for found, offset in zip(got, offsets, strict=True):
        close(found, by_positions(offset, *OPERANDS, causal=True))


def test_another_offset_compiles_nothing() -> None:
    over: dict[str, Any] = {"causal": True, "mesh": mesh_of(sp=2), "axis_name": "sp"}
    programs = []
    for offset in (1, 2):
        ring_attention(QUERY, KEY, VALUE, query_offset=offset, **over)
        programs.append(sharding._run._cache_size())
    assert programs[0] == programs[1]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beside positions": ({"query_offset": 1, "q_positions": jnp.arange(T)}, "is given beside q_positions"),
    "too far": ({"query_offset": 2**30 - T + 1}, r"query_offset: has the value 1073741801\. .* to 1073741800"),
    "of another batch": ({"query_offset": [1, 2, 3]}, r"query_offset: has shape \(3,\)\. Pass one integer, or 2"),
    "a fraction": ({"query_offset": 0.5}, "query_offset: has dtype float64. It needs integers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    options, told = REFUSED[name]
    with pytest.raises(InputError, match=told):
        ring_attention(QUERY, KEY, VALUE, causal=True, **options)
