# SPDX-License-Identifier: Apache-2.0
"""`max_distance` leaves out hops and rows of keys; results stay the same while it is true."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from ringattn_core import MaskInfo, ring_attention, to_layout
from ringattn_core.call.validation import validated
from ringattn_core.errors import InputError
from ringattn_core.placement.layout import Shards
from ringattn_core.ring.plan import rows_seen
from ringattn_testing.rings import close, drawn, graded, in_order_of, mesh_of, query_key_value

B, T, N, K = 2, 48, 4, 2
DOCUMENTS = [[5, 10, 3, 9, 10, 8], [10, 10, 10, 10]]
INFO = MaskInfo.from_documents(DOCUMENTS, T, restart_positions=True)
IDS, POSITIONS = (np.asarray(x) for x in (INFO.q_segment_ids, INFO.q_positions))
FARTHEST = 9
QUERY, KEY, VALUE = query_key_value(B, T, N, K)
(BIAS,) = drawn((1, N, T, T))


@pytest.mark.parametrize(
    ("ranks", "layout", "kind"),
    [
        (1, "contiguous", AxisType.Auto),
        (2, "contiguous", AxisType.Auto),
        (3, "zigzag", AxisType.Explicit),
        (4, "striped", AxisType.Auto),
        (8, "contiguous", AxisType.Explicit),
        (8, "zigzag", AxisType.Auto),
    ],
)
def test_results_and_gradients_of_packed_rows_with_positions_are_those_of_one_device(
    ranks: int, layout: str, kind: AxisType
) -> None:
    """Ids and positions are traced. Positions restart, so that causality alone leaves out no hop.

    The gradient of a bias has the columns of all keys, also where a hop has a few of a shard's.
    """
    ids, positions = jnp.asarray(IDS), jnp.asarray(POSITIONS)

    @jax.jit
    def found(ids: Any, positions: Any) -> Any:
        of_tokens = {"q_segment_ids": to_layout(ids, layout, ranks), "q_positions": to_layout(positions, layout, ranks)}
        ring = {"mesh": mesh_of(kind, sp=ranks), "axis_name": "sp", "layout": layout, "max_distance": (FARTHEST, 0)}

        def attend(bias: Any, *operands: Any) -> Any:
            rows = to_layout(bias, layout, ranks, axis=2)
            call = functools.partial(ring_attention, bias=rows, causal=True, **of_tokens, **ring)
            return in_order_of(layout, ranks, call)(*operands)

        return graded(attend, BIAS, QUERY, KEY, VALUE)

    def whole(bias: Any, *operands: Any) -> Any:
        return ring_attention(*operands, bias=bias, causal=True, q_segment_ids=ids, q_positions=positions)

    close(found(ids, positions), graded(whole, BIAS, QUERY, KEY, VALUE), 5e-5)


def rows(layout: str, **options: Any) -> dict[int, tuple[int, int]]:
    """The rows that each hop of a ring of four sends, by how far they travel; ids and positions are not known."""
    options = {"q_segment_ids": IDS, "max_distance": FARTHEST} | options
    call = validated(QUERY, KEY, VALUE, layout=layout, ranks=1, **options)
    return rows_seen(call.reach_of_hops, Shards(layout, 4), (T // 4, T // 4))


@pytest.mark.parametrize(
    ("layout", "options", "sent"),
    [
        ("contiguous", {}, {1: (3, 12), 3: (0, 9)}),
        ("contiguous", {"causal": True}, {1: (3, 12)}),
        ("contiguous", {"causal": True, "sliding_window": 4}, {1: (6, 12)}),
        ("contiguous", {"causal": True, "q_positions": POSITIONS}, {1: (3, 12), 3: (0, 9)}),
        ("contiguous", {"max_distance": (FARTHEST, 0), "q_positions": POSITIONS}, {1: (3, 12)}),
        ("contiguous", {"max_distance": (FARTHEST, 0), "query_offset": 100}, {1: (3, 12)}),
        ("zigzag", {"causal": True}, {1: (0, 6), 2: (3, 12), 3: (3, 12)}),
        ("striped", {}, {1: (0, 12), 2: (0, 12), 3: (0, 12)}),
    ],
)
def test_only_rows_within_the_distance_travel(
    layout: str, options: dict[str, Any], sent: dict[int, tuple[int, int]]
) -> None:
    assert rows(layout, **options) == {0: (0, 12)} | sent


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "below a window": (
        {"sliding_window": (7, 2), "max_distance": 5},
        r"promises 5 on the left, but the masks let a query see a key 7 tokens away there\. Pass at least 7, or the",
    ),
    "below a chunk": ({"chunk_size": 8, "max_distance": 6}, "promises 6 on the left, .* a key 7 tokens away there"),
    "of no mask": ({"max_distance": (None, 3)}, "promises 3 on the right, .* a key 47 tokens away there"),
    "negative": ({"max_distance": -1}, "max_distance: got -1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_promise_that_cannot_be_true_is_refused(name: str) -> None:
    options, told = REFUSED[name]
    with pytest.raises(InputError, match=told):
        ring_attention(QUERY, KEY, VALUE, **options)
    ring_attention(QUERY, KEY, VALUE, chunk_size=8, max_distance=(7, 0))
