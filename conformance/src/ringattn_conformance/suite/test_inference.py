# SPDX-License-Identifier: Apache-2.0
"""Results for queries at the end of a longer sequence are the oracle's: `query_offset`, prefill and decoding."""

import dataclasses
from typing import Any, Final

import numpy as np
import pytest
from jax.sharding import PartitionSpec
from ringattn_core import decode_attention, prefill_attention
from ringattn_core.backends import discovery
from ringattn_core.contract.features import Feature

from ringattn_conformance import case_inputs, oracle, tiers
from ringattn_conformance.cases import ENTRIES, keywords, of_entry
from ringattn_conformance.outcomes import agrees
from ringattn_conformance.ranks import RING, Arrays, Placed, Placement, place, static_options

LENGTHS: Final = np.array([45, 11])
"""The tokens in each batch row of a cache with room for 48. With 16 queries, row 1 has some negative positions."""
QUERIES: Final = 16
CASES: Final = {entry["name"]: entry for entry in ENTRIES["cache"]}


WHOLE: Final = ("q", "out", "lse", "first", "last")
"""The arrays with an axis of queries."""


class WholeQueries(Placed):
    """A placed case in which the ring splits the keys only: every rank has all queries and the whole result."""

    def spec(self, name: str, shape: tuple[int, ...]) -> PartitionSpec:
        split = super().spec(name, shape)
        return PartitionSpec(*(None if x == RING else x for x in split)) if name in WHOLE else split


def _placed(name: str, backend: str, tokens: int = QUERIES) -> Placed:
    """The case of that name, with this number of queries, and ranges at their positions."""
    entry = CASES[name]
    case = dataclasses.replace(of_entry(entry), q_length=tokens)
    placed = place(case, Placement(entry["ring"], entry["layout"]), backend)
    if case.ranges is None:
        return placed
    at = dataclasses.replace(placed.inputs.problem, q_positions=_positions(tokens))
    return placed.changed(kv_range=case_inputs.RANGES[case.ranges](*oracle.positions(at), case.batch, case.heads))


def _positions(tokens: int) -> np.ndarray:
    return LENGTHS[:, None] - tokens + np.arange(tokens)


def _agrees(placed: Placed, local: Any, gradients: bool | None = None) -> None:
    """Asserts that one rank's call, `local(arrays)`, agrees with the oracle on queries at the end of each row."""
    problem = dataclasses.replace(placed.inputs.problem, q_positions=_positions(placed.case.q_length))

    def whole(operands: Arrays, fixed: Arrays) -> Arrays:
        return local(operands | fixed)

    agrees(placed, gradients, needs=[Feature.POSITIONS], local=whole, problem=problem)


def _from_cache(function: Any, placed: Placed, arrays: Arrays, **more: Any) -> Arrays:
    """One rank's call of `prefill_attention` or `decode_attention`, which are always causal."""
    options = static_options(placed.case) | more
    options |= keywords({name: x for name, x in arrays.items() if name not in ("q", "k", "v")})
    del options["causal"]
    options |= {"axis_name": RING, "layout": placed.placement.layout, "backend": placed.backend}
    return placed.by_name(function(arrays["q"], arrays["k"], arrays["v"], LENGTHS, **options))


@tiers.mark(tiers.CORE, "plain", "ranges")
@pytest.mark.parametrize("name", CASES)
def test_an_offset_places_queries_in_a_longer_sequence(ringattn_backend: str, name: str):
    placed = _placed(name, ringattn_backend)
    _agrees(placed, lambda arrays: placed.local(arrays, {}, query_offset=LENGTHS - QUERIES))


@tiers.mark(tiers.CORE, "plain", "ranges")
@pytest.mark.parametrize("name", CASES)
def test_prefill_that_sends_the_queries(ringattn_backend: str, name: str):
    """Prefill with `send="queries"` has no gradients, and runs only for backends with a block kernel."""
    if discovery.get(ringattn_backend).descriptor().kernel is not None:
        placed = _placed(name, ringattn_backend)
        _agrees(placed, lambda arrays: _from_cache(prefill_attention, placed, arrays, send="queries"), gradients=False)


@tiers.mark(tiers.CORE, "3-plain", "3-everything", "3-ranges")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("tokens", [1, 3])
def test_decoding_from_a_cache(ringattn_backend: str, tokens: int, name: str):
    """Decodes 1 or 3 new tokens. Keys stay on their ranks, so it runs only for backends with a block kernel."""
    if discovery.get(ringattn_backend).descriptor().kernel is not None:
        placed = _placed(name, ringattn_backend, tokens)
        whole = WholeQueries(placed.case, placed.placement, placed.backend, placed.inputs)
        _agrees(whole, lambda arrays: _from_cache(decode_attention, whole, arrays), gradients=False)
