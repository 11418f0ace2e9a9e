# SPDX-License-Identifier: Apache-2.0
"""Every strategy computes the oracle's output and gradients: with every option, on every ring, layout and mesh."""

import functools
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from ringattn_conformance import comparison
from ringattn_conformance.cases import Case
from ringattn_conformance.ranks import DATA, RING, Placement, place, with_gradients
from ringattn_core import Backend, Feature, ring_attention
from ringattn_core.backends import discovery
from ringattn_core.call.validation import validated
from ringattn_core.contract import packing
from ringattn_core.strategies.run import strategy_of
from ringattn_testing.rings import mesh_of, query_key_value
from ringattn_testing.traced_calls import forget_traced_calls

# Together the cases use every option that a strategy moves between ranks.
MASKS = Case(
    "masks", batch=1, heads=8, kv_heads=2, kv_length=96, value_dim=12, window=(30, 9), dense_mask="BNT",
    segments="scattered-padding", builder="of-heads", lse=True,
)  # fmt: skip
SCORES = Case(
    "scores", heads=8, kv_heads=4, causal=True, positions="far-rows", bias="BNT", slopes=True, sinks="each",
    dropout=0.2, soft_cap=2.0,
)  # fmt: skip
BROADCAST = Case(
    "broadcast", heads=8, causal=True, segments="large-ids", bias="T", dense_mask="NT", sinks="head",
    dtype="bfloat16",
)  # fmt: skip
OF_HEADS = Case("of-heads", heads=6, kv_heads=3, bias="N", dense_mask="T", dropout=0.1, causal=True, lse=True)

ROWS = Case("rows", heads=8, kv_heads=4, causal=True, bias="BT", dtype="bfloat16")
HALF_ROWS = Case("half-rows", heads=8, bias="T", dtype="float16", lse=True)
HEAD_ROWS = Case("head-rows", heads=8, causal=True, bias="NT", dtype="bfloat16")


def agrees(case: Case, placement: Placement, mesh: Mesh | None = None) -> None:
    """Checks the output, the lse and every gradient of one compiled call, of global arrays where there is a `mesh`."""
    placed = place(case, placement, "xla")
    everywhere = placed.everywhere() if mesh is None else functools.partial(placed.local, mesh=mesh)
    found = jax.jit(with_gradients(everywhere))(placed.operands, placed.fixed, placed.cotangents)
    comparison.check(placed.natural(found), case.answer, case, f"on {placed.placement}")


@pytest.mark.parametrize(
    ("case", "placement"),
    [
        (MASKS, Placement(4, "zigzag", check_vma=False, strategy="all_gather")),
        (SCORES, Placement(8, "striped", strategy="all_gather")),
        (SCORES, Placement(2, "striped", data=2, heads=2, strategy="ulysses")),
        (OF_HEADS, Placement(3, "striped", check_vma=False, strategy="ulysses")),
        (MASKS, Placement(4, "striped", emulated=True, strategy="ulysses")),
        (SCORES, Placement(8, "zigzag", check_vma=False, strategy="ulysses")),
    ],
    ids=str,
)
def test_the_output_and_all_gradients_are_those_of_the_oracle(case: Case, placement: Placement):
    agrees(case, placement)


@pytest.mark.parametrize(
    ("kind", "case", "placement"),
    [
        (AxisType.Auto, ROWS, Placement(4, "zigzag", strategy="ulysses")),
        (AxisType.Explicit, HALF_ROWS, Placement(2, data=2, strategy="ulysses")),
        (AxisType.Auto, HEAD_ROWS, Placement(2, "striped", data=2, strategy="ulysses")),
        (AxisType.Explicit, HEAD_ROWS, Placement(4, "zigzag", strategy="ulysses")),
    ],
    ids=str,
)
def test_a_bias_that_ranks_share_has_the_gradient_of_the_oracle(kind: AxisType, case: Case, placement: Placement):
    """Ulysses gathers it where all heads share it, and exchanges it where batch rows on several ranks do."""
    sizes = (placement.data, placement.ring)
    agrees(case, placement, mesh=jax.make_mesh(sizes, (DATA, RING), axis_types=(kind, kind)))


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "ulysses"])
def test_gradients_are_right_where_a_gpu_packs_keys_and_values(strategy: str, monkeypatch: pytest.MonkeyPatch):
    """The way that only GPUs pack them has no derivative, so no strategy may leave it to JAX to differentiate it."""
    monkeypatch.setattr(packing, "pack_to_send", packing._in_pairs)
    forget_traced_calls()
    agrees(BROADCAST, Placement(2, "zigzag", strategy=strategy))
    forget_traced_calls()


AUTO: dict[str, tuple[dict[str, Any], int, str]] = {
    # Options of a causal call with 8 query heads, its key heads, and the strategy that "auto" takes on 4 ranks.
    "key heads that the ranks divide": ({}, 4, "ulysses"),
    "key heads that they do not divide": ({}, 2, "ring"),
    "a window that leaves out hops": ({"sliding_window": (5, 0)}, 4, "ring"),
    "a window that leaves out none": ({"sliding_window": (64, 0)}, 4, "ulysses"),
    "a distance that leaves out keys": ({"max_distance": 9, "q_segment_ids": np.zeros((1, 16), int)}, 4, "ring"),
    "chunks of a shard": ({"chunk_size": 16}, 4, "ring"),
    "chunks where queries have an offset": ({"chunk_size": 16, "query_offset": 0}, 4, "ulysses"),
    "a window in zigzag order": ({"sliding_window": (5, 0), "layout": "zigzag"}, 4, "ring"),
    "a window in striped order": ({"sliding_window": (5, 0), "layout": "striped"}, 4, "ulysses"),
}


@pytest.mark.parametrize("name", AUTO)
def test_auto_is_the_ring_where_masks_leave_out_hops_else_ulysses_where_key_heads_divide(name: str):
    options, key_heads, wanted = AUTO[name]
    shard = query_key_value(1, 16, 8, key_heads)
    call = validated(*shard, ranks=4, causal=True, strategy="auto", **options)
    assert strategy_of(None, call, (4, 4)) == wanted


@pytest.mark.parametrize(
    ("axes", "wanted"),
    [({"outer": 2, "inner": 2}, "ulysses"), ({"outer": 4, "inner": 1}, "ring"), ({"outer": 1, "inner": 4}, "ulysses")],
)
def test_auto_counts_the_ranks_of_the_last_axis(axes: dict[str, int], wanted: str):
    operands = query_key_value(1, 64, 4, 4)

    def program(strategy: str) -> str:
        options: dict[str, Any] = {"mesh": mesh_of(**axes), "axis_name": tuple(axes), "strategy": strategy}
        return str(jax.make_jaxpr(functools.partial(ring_attention, **options))(*operands))

    assert program("auto").count("all_to_all[") == program(wanted).count("all_to_all[")


def test_auto_is_the_ring_of_a_backend_that_drives_its_own():
    own = Backend("own", 1, ("cpu",), tuple(Feature), ring="nowhere:RING")
    x = query_key_value(1, 64, 4, 4)
    with discovery.registered(own, lambda query, **options: 2 * query):
        out = ring_attention(*x, backend="own", strategy="auto", mesh=mesh_of(sp=4), axis_name="sp")
    assert (out == 2 * x[0]).all()
