# SPDX-License-Identifier: Apache-2.0
"""`query_offset` places queries in a longer sequence: values and gradients equal the oracle."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from ringattn_conformance import oracle
from ringattn_core import MaskInfo, from_layout, masks, ring_attention, to_layout
from ringattn_core.call import sharding
from ringattn_core.call.validation import validated
from ringattn_core.errors import InputError
from rings import agrees, close, drawn, mesh_of

B, T, S, N, K, H = 2, 24, 48, 4, 2, 8
SHAPES = ((B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H))
QUERY, KEY, VALUE, DOUT = drawn(*SHAPES)
SLOPES = jnp.linspace(0.1, 0.5, N)
OFFSETS = np.array([9, 24])
MANY: dict[str, Any] = {"causal": True, "sliding_window": (13, 0), "alibi_slopes": SLOPES}


def expected(offset: Any, **options: Any) -> oracle.Answer:
    names = {"sliding_window": "window", "alibi_slopes": "slopes"}
    positions = np.broadcast_to(np.asarray(offset)[..., None], (B, 1)) + np.arange(T)
    given = {names.get(name, name): x for name, x in options.items()}
    q, k, v, dout = (np.asarray(x) for x in (QUERY, KEY, VALUE, DOUT))
    return oracle.attend(oracle.Problem(q, k, v, q_positions=positions, **given), dout)


def differentiated(attend: Any, ranks: int, layout: str, offset: Any) -> Any:
    """The output and the gradients of operands and slopes, in natural order. The offset is traced."""
    *moved, dout = (to_layout(x, layout, ranks) for x in (QUERY, KEY, VALUE, DOUT))

    @jax.jit
    def run(offset: Any, slopes: Any, *operands: Any) -> Any:
        out, pull = jax.vjp(lambda slopes, *operands: attend(offset, slopes, *operands), slopes, *operands)
        return out, pull(dout)

    out, (dslopes, *gradients) = run(jnp.asarray(offset), SLOPES, *moved)
    return *(from_layout(x, layout, ranks) for x in (out, *gradients)), dslopes


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

    def attend(offset: Any, slopes: Any, *operands: Any) -> Any:
        return ring_attention(*operands, query_offset=offset, **over, **MANY | {"alibi_slopes": slopes})

    agrees(differentiated(attend, 4, layout, OFFSETS), expected(OFFSETS, **MANY), "dq", "dk", "dv", "dslopes")


def test_a_two_sided_window_counts_from_the_offset() -> None:
    """Without an offset, the window would leave out hops that these queries need."""
    got = ring_attention(QUERY, KEY, VALUE, query_offset=24, mesh=mesh_of(sp=8), axis_name="sp", sliding_window=2)
    close(got, expected(24, sliding_window=2).out)


def test_predicates_see_the_position_and_dropout_sees_the_index() -> None:
    even = masks.Predicate(lambda i, j: (i - j) % 2 == 0)
    got = ring_attention(QUERY, KEY, VALUE, query_offset=3, mask_builder=lambda *_: even)
    seen = (np.arange(T)[:, None] + 3 - np.arange(S)) % 2 == 0
    close(got, expected(3, seen=seen).out)
    got = ring_attention(QUERY, KEY, VALUE, query_offset=3, dropout_prob=0.3, dropout_seed=5)
    close(got, expected(0, dropout=0.3, seed=5).out)


def test_keys_may_have_positions_of_their_own() -> None:
    where = jnp.arange(S)[::-1]
    got = ring_attention(QUERY, KEY, VALUE, causal=True, query_offset=20, kv_positions=where)
    wanted = ring_attention(QUERY, KEY[:, ::-1], VALUE[:, ::-1], causal=True, query_offset=20)
    close(got, wanted)
    square = validated(QUERY, KEY[:, :T], VALUE[:, :T], query_offset=20, kv_positions=where[:T])
    assert square.q_positions is None and not square.rule.increasing


def test_a_vmapped_offset_is_that_of_each_example() -> None:
    offsets = jnp.array([0, 5])
    over: dict[str, Any] = {"causal": True, "mesh": mesh_of(sp=2), "axis_name": "sp"}
    got = jax.vmap(lambda offset: ring_attention(QUERY, KEY, VALUE, query_offset=offset, **over))(offsets)
    for found, offset in zip(got, offsets, strict=True):
        close(found, expected(int(offset), causal=True).out)


def test_another_offset_compiles_nothing() -> None:
    over: dict[str, Any] = {"causal": True, "mesh": mesh_of(sp=2), "axis_name": "sp"}
    programs = []
    for offset in (1, 2):
        ring_attention(QUERY, KEY, VALUE, query_offset=offset, **over)
        programs.append(sharding._run._cache_size())
    assert programs[0] == programs[1]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "beside positions": ({"query_offset": 1, "q_positions": jnp.arange(T)}, "is given beside q_positions"),
    "beside positions in a mask": (
        {"query_offset": 1, "mask_info": MaskInfo.from_positions(np.arange(T), np.arange(S))},
        "is given beside q_positions",
    ),
    "too far": ({"query_offset": 2**30 - T + 1}, r"query_offset: has the value 1073741801\. .* to 1073741800"),
    "of another batch": ({"query_offset": [1, 2, 3]}, r"query_offset: has shape \(3,\)\. Pass one integer, or 2"),
    "a fraction": ({"query_offset": 0.5}, "query_offset: has dtype float64. It needs integers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    options, told = REFUSED[name]
    with pytest.raises(InputError, match=told):
        ring_attention(QUERY, KEY, VALUE, causal=True, **options)
