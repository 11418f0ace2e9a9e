# SPDX-License-Identifier: Apache-2.0
"""The mixtures: together they have every pair of options, they use declared features only, and each option matters."""

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
from ringattn_conformance import case_inputs, oracle, tiers
from ringattn_conformance.lattice import Point
from ringattn_conformance.mixtures import FACTORS, MASKS, mixtures
from ringattn_conformance.tolerances import allowed
from ringattn_core.contract.features import Feature

ALL = frozenset(Feature)
DTYPES = {Feature.FLOAT32, Feature.FLOAT16, Feature.BFLOAT16}
WITHOUT: dict[str, dict[str, Any]] = {
    "causal": {"causal": False},
    "window": {"window": None},
    "chunk": {"chunk": None},
    "segments": {"q_segments": None, "kv_segments": None},
    "positions": {"q_positions": None, "kv_positions": None},
    "soft_cap": {"soft_cap": None},
    "scale": {"scale": None},
    "sinks": {"sinks": None},
    "bias": {"bias": None},
    "slopes": {"slopes": None},
    "dropout": {"dropout": 0.0},
}
"""By option, the fields of a problem without it."""
IMPLIED = {("causal", "chunk")}
"""A chunk is causal anyway."""


def needs(mixture: Point) -> frozenset[Feature]:
    return mixture.case.needs | mixture.placement.needs


def test_every_two_features_meet():
    met = {pair for one in mixtures(ALL) for pair in itertools.combinations(sorted(needs(one), key=str), 2)}
    features = sorted(ALL - {Feature.GRADIENTS}, key=str)
    missing = {frozenset(pair) for pair in itertools.combinations(features, 2)} - {frozenset(pair) for pair in met}
    halves = {frozenset({Feature.PRECISION, dtype}) for dtype in (Feature.FLOAT16, Feature.BFLOAT16)}
    apart = {frozenset(pair) for pair in itertools.combinations(DTYPES, 2)}
    assert missing == halves | apart | {frozenset({Feature.ZIGZAG, Feature.STRIPED})}


def test_every_feature_is_in_the_first_cover_in_every_dtype():
    for feature in ALL - DTYPES - {Feature.GRADIENTS, Feature.PRECISION}:
        assert {*DTYPES} == {
            dtype for one in mixtures(ALL, covers=1) if feature in needs(one) for dtype in DTYPES & needs(one)
        }


def test_any_three_masks_meet():
    fields = [next(iter(FACTORS[factor][1])) for factor in MASKS]
    masks = [frozenset(name for name in fields if getattr(one.case, name)) for one in mixtures(ALL, covers=1)]
    for three in itertools.combinations(fields, 3):
        assert any(found.issuperset(three) for found in masks), three


@pytest.mark.parametrize(
    "features",
    [
        {Feature.GRADIENTS, Feature.FLOAT32, Feature.CAUSAL},
        {Feature.BFLOAT16, Feature.SEGMENT_IDS, Feature.GROUPED_HEADS},
        ALL - {Feature.RETURN_LSE, Feature.FLOAT32},
    ],
    ids=["three features", "bfloat16 alone", "without lse and float32"],
)
def test_a_backend_gets_mixtures_of_what_it_declares(features: set[Feature]):
    found = mixtures(frozenset(features), covers=1)
    assert frozenset().union(*(needs(one) for one in found)) == set(features) - {Feature.GRADIENTS} - (
        {Feature.PRECISION} if Feature.FLOAT32 not in features else set()
    )


@pytest.mark.parametrize(("lacking", "largest"), [(None, 1), (Feature.GROUPED_HEADS, 8)])
def test_levels_that_need_a_ring_or_grouped_heads_are_left_out_without_them(lacking: Feature | None, largest: int):
    found = mixtures(ALL - {lacking}, largest)
    assert {one.placement.ring for one in found} == {1, 2, 3, 4, 8} & {*range(largest + 1)}
    assert not any(one.placement.two_way for one in found)


def test_a_backend_of_no_dtype_gets_none():
    assert mixtures(frozenset({Feature.CAUSAL})) == ()


def test_no_ring_is_larger_than_asked_and_every_name_is_used_once():
    assert {one.placement.ring for one in mixtures(ALL, 2)} == {1, 2}
    found = mixtures(ALL)
    assert len({str(one) for one in found}) == len(found)
    assert {one.placement.ring for one in found} == {1, 2, 3, 4, 8}


OPTIONS = ("causal", "window", "chunk", "segments", "positions", "builder", "dense_mask", "soft_cap", "sinks", "bias",
           "slopes", "dropout", "lse", "fused_backward")  # fmt: skip


def test_every_option_is_in_every_dtype_with_every_head_size_and_grouping_and_on_one_rank():
    """Kernels may have code of their own for each. On one rank the calls of the second cover are meant."""
    every = mixtures(ALL)
    seen: set[tuple[str, str, Any]] = set()
    for one in every:
        case = one.case
        grouping = "no groups" if case.kv_heads == case.heads else f"groups of {case.kv_heads} key heads"
        places = [case.head_dim, grouping, *["one rank"] * (one.tier == tiers.FULL and one.placement.ring == 1)]
        seen |= {(name, case.dtype, place) for name in OPTIONS if getattr(case, name) for place in places}
    places = {place for _, _, place in seen}
    assert len(places) == len(FACTORS["head size"]) + len(FACTORS["heads"]) + 1
    assert seen == set(itertools.product(OPTIONS, (level["dtype"] for level in FACTORS["dtype"]), places))


def matters(mixture: Point, option: str) -> bool:
    """Whether a kernel that ignores the option is beyond the tolerance."""
    case = mixture.case
    problem, want = case.inputs.problem, case.answer
    out = oracle.attend(dataclasses.replace(problem, **WITHOUT[option])).out
    tolerance = allowed("out", case.dtype, want.out, want.largest, want.uncapped)
    return float(np.abs(out - want.out).max()) > 5 * tolerance


def test_an_option_that_is_ignored_beside_another_or_in_one_dtype_shows():
    """An option matters in some mixture with each other option, in each dtype, and with each head size and group."""
    seen: set[tuple[str, Any]] = set()
    for one in mixtures(ALL, covers=1):
        present = [option for option in WITHOUT if getattr(one.case, option) not in (None, False, 0.0)]
        beside = [*present, one.case.dtype, one.case.head_dim, one.case.heads]
        seen |= {(option, other) for option in present if matters(one, option) for other in beside}
    sizes = [level[name] for factor, name in (("dtype", "dtype"), ("head size", "head_dim"), ("heads", "heads"))
             for level in FACTORS[factor]]  # fmt: skip
    wanted = {(option, other) for option in WITHOUT for other in (*WITHOUT, *sizes) if other != option}
    assert wanted - seen - IMPLIED == set()


def test_every_token_of_scattered_positions_has_its_own():
    """With one position for many keys, the gradient of ALiBi slopes could be zero, and rounding alone would show."""
    for length in range(1, 500):
        assert len(np.unique(case_inputs.scattered(1, length, length)[0])) == length
