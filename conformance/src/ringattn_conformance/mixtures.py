# SPDX-License-Identifier: Apache-2.0
"""Generated calls that use many options at once: together they try every pair of options that a backend declares.

A factor is an option or a property of a call, and its levels are the values that are tried. A mixture has one level of
every factor. A cover is a set of mixtures in which any two levels that the contract allows together, and any three
masks, occur together at least once; the first cover leaves out pairs that compile slowly. Later covers draw other
mixtures, so that more triples of options occur. They have every option in every dtype on a ring of one, and with the
first cover every option in every dtype with each head size and each grouping of heads: kernels may have code of their
own for each.
"""

import dataclasses
import functools
import itertools
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ringattn_core.contract.features import Feature

from . import case_inputs
from .cases import DTYPES, Case
from .lattice import Point
from .ranks import Placement
from .tiers import CORE, FULL, RINGS

Level = Mapping[str, Any]
"""Fields of `Case` and of `Placement`. The empty level leaves an option out."""
OFF: Final[Level] = {}
HEAD_DIMS: Final = (64, 21, 128, 80, 192, 96, 256)
FACTORS: Final[dict[str, tuple[Level, ...]]] = {
    "dtype": tuple({"dtype": name} for name in DTYPES),
    "ring": tuple({"ring": ranks} for ranks in (2, 1, 3, 4, 8)),
    "layout": tuple({"layout": name} for name in ("contiguous", "zigzag", "striped")),
    "heads": (
        {"batch": 1, "heads": 10, "kv_heads": 2},
        {"batch": 3, "heads": 6, "kv_heads": 3},
        {"batch": 5, "heads": 3, "kv_heads": 3},
        {"batch": 2, "heads": 8, "kv_heads": 1},
    ),
    "head size": tuple({"head_dim": size} for size in HEAD_DIMS),
    "value size": (OFF, {"value_dim": 136}),
    "lengths": (OFF, {"kv_length": 84}, {"q_length": 84}),
    "causal": (OFF, {"causal": True}),
    "window": (OFF, {"window": (17, 4)}, {"window": (None, 6)}, {"window": (20, None)}),
    "chunk": (OFF, {"chunk": 20}),
    "segments": (OFF, {"segments": case_inputs.large_ids}, {"segments": case_inputs.scattered_padding}),
    "positions": (OFF, {"positions": case_inputs.far}, {"positions": case_inputs.far_rows}),
    "builder": (OFF, {"builder": case_inputs.OF_HEADS}, {"builder": case_inputs.ALGEBRA}),
    "dense mask": (OFF, {"dense_mask": "NT"}, {"dense_mask": "BT"}),
    "soft cap": (OFF, {"soft_cap": 2.0}),
    "scores": (OFF, {"scale": -1.3}, {"gain": 4096.0, "scale": 2.0**-10}, {"gain": 40.0}),
    "sinks": (OFF, {"sinks": "head"}, {"sinks": "each"}),
    "bias": (OFF, {"bias": "NT", "bias_dtype": "float32"}, {"bias": "BT", "bias_forbids": True}, {"bias": "B"}),
    "slopes": (OFF, {"slopes": 1}),
    "dropout": (OFF, {"dropout": 0.2}),
    "lse": (OFF, {"lse": True}),
    "fused backward": (OFF, {"fused_backward": True}),
    "two ways": (OFF, {"two_way": True}),
    "precision": (OFF, {"precision": "highest"}),
}
"""The levels of each factor. With a gain of 4096, products of float16 overflow unless they are summed in float32."""
VARIANTS: Final[dict[str, dict[int, tuple[Level, ...]]]] = {
    "heads": {
        0: ({"batch": 1, "heads": 16, "kv_heads": 2},),
        2: ({"batch": 7, "heads": 2, "kv_heads": 2}, {"batch": 2, "heads": 5, "kv_heads": 5}),
    },
    "window": {1: ({"window": (17, 0)},), 2: ({"window": (0, 25)},)},
    "segments": {1: ({"segments": case_inputs.interleaved},)},
    "positions": {1: ({"positions": case_inputs.scattered},), 2: ({"positions": case_inputs.backward_rows},)},
    "builder": {2: ({"builder": case_inputs.INDEXED},)},
    "dense mask": {1: ({"dense_mask": "BNT"},), 2: ({"dense_mask": "T"},)},
    "scores": {1: ({"scale": 1.7},)},
    "bias": {
        1: ({"bias": "NT", "bias_dtype": "bfloat16"},),
        2: ({"bias": "BNT", "bias_forbids": True},),
        3: ({"bias": "BN"}, {"bias": ""}),
    },
}
"""By factor and number of a level: what the level is by turns, after the one in `FACTORS`. A turn passes with each
mixture of the same dtype that has the level, so every variant is tried in every dtype and needs no further mixture."""
MASKS: Final = ("causal", "window", "chunk", "segments", "positions", "builder", "dense mask")
TRIES: Final = 40
SEEDS: Final = (22, 35)
"""By cover. The first has this property: beside each other option, in each dtype and with each head size, there is a
mixture whose output is wrong if a kernel ignores the option (`tests/test_mixtures.py`). With the second, few mixtures
meet all targets."""
FIRST_RINGS: Final = 3
"""The largest ring of the first cover. Programs for larger rings compile slowly; the second cover has them."""
FIRST_PARTNERS: Final = {"two ways": ("dtype", "layout", "heads"), "ring": ("dtype", "layout", "lengths")}
"""The only factors with which the first cover pairs these factors, for the same reason."""
NONZERO: Final = 16
"""How many components of a query of float32 are not zero where scores are large. The rounding error of a sum of large
products grows with their number, and the tolerance does not: a right kernel that adds 256 of them may be beyond it."""
LENGTH: Final = 60
LATER_LENGTHS: Final = 4
"""By what factor sequences of later covers are longer, so that a rank has several tiles and may skip some."""
LENGTHS_ON_ONE_RANK: Final = 5
"""The same on a ring of one, so that queries and keys fill a tile of 256 and begin another."""
RING_OF_ONE: Final = FACTORS["ring"].index({"ring": 1})
OPTIONS: Final = (*MASKS, "soft cap", "scores", "sinks", "bias", "slopes", "dropout", "lse", "fused backward")
"""The factors that are tried in every dtype with each head size and each grouping of heads."""
CHEAPEST_FIRST: Final = ("ring", "two ways")
"""Factors whose first level compiles fastest: it is chosen if other levels would meet no more targets."""
MOST_MASKS: Final = 4
"""With more masks at once most queries would see no key."""
_OF_PLACEMENT: Final = frozenset({"ring", "layout", "two_way"})
_ENOUGH_APART: Final = frozenset({"head size", "ring"})
"""Two factors whose pairs need not all be tried, because a kernel does not depend on the ring."""

Choice = dict[str, int]
"""The number of the chosen level of each factor."""
Target = frozenset[tuple[str, int]]


@functools.cache
def mixtures(features: frozenset[Feature], largest: int = RINGS[-1], covers: int = len(SEEDS)) -> tuple[Point, ...]:
    """The mixtures for a backend with these features. They use nothing else, and no ring of more than `largest`.

    Those of the first cover are in the core tier, those of later covers in the full tier.
    """
    found: list[Point] = []
    chosen: list[Choice] = []
    turns: Counter[tuple[int, str, int]] = Counter()
    for cover in range(covers):
        rings = largest if cover else min(largest, FIRST_RINGS)
        allowed = {factor: _declared(factor, features, rings) for factor in FACTORS}
        if not all(allowed.values()):
            break
        draw = random.Random(SEEDS[cover])
        missing = sorted(_targets(allowed) | (_triples(allowed, ["ring"], [*FACTORS]) if cover else set()), key=sorted)
        if cover == 0:
            missing = [target for target in missing if _compiles_fast(dict(target))]
        # The later covers have two parts: pairs first, then the triples that no mixture has met so far.
        for triples in (False, True) if cover else (False,):
            if triples:
                wanted = frozenset(_triples(allowed, ["head size", "heads"], OPTIONS))
                missing = sorted(wanted.difference(*(_met(choice, wanted) for choice in chosen)), key=sorted)
            while missing:
                known = frozenset(missing)
                choices = [_filled(allowed, missing, known, draw, triples) for _ in range(TRIES)]
                best = max(choices, key=lambda choice: len(_met(choice, known)))
                met = _met(best, known)
                missing = [target for target in missing if target not in met]
                chosen.append(best)
                found.append(_mixture(best, len(found), cover, turns))
    return tuple(found)


def _declared(factor: str, features: frozenset[Feature], largest: int) -> list[int]:
    """The numbers of the levels of a factor that need declared features only."""

    def needs(number: int) -> frozenset[Feature]:
        case, placement = _call({factor: number})
        own = case.needs | placement.needs
        return own if factor == "dtype" else own - {Feature.FLOAT32}

    def partner(level: Level) -> bool:
        """Whether another factor has a level that this one needs."""
        if level.get("two_way") and largest < 3:
            return False
        return not level.get("precision") or Feature.FLOAT32 in features

    return [
        number
        for number, level in enumerate(FACTORS[factor])
        if needs(number) <= features and level.get("ring", 1) <= largest and partner(level)
    ]


def _call(choice: Choice, turns: Mapping[str, int] | None = None) -> tuple[Case, Placement]:
    """The call with these levels; `turns` says, by factor, how many mixtures of the dtype have had the level before."""
    fields: dict[str, Any] = {"name": "", "q_length": LENGTH, "kv_length": LENGTH}
    for factor, number in choice.items():
        variants = (FACTORS[factor][number], *VARIANTS.get(factor, {}).get(number, ()))
        fields |= variants[(turns or {}).get(factor, 0) % len(variants)]
    left, right = fields.get("window") or (None, None)
    if left == 0 and (fields.get("causal") or fields.get("chunk")):
        fields["window"] = (1, right)  # with a single key that it sees, a query would have gradients of zero
    if fields.get("dtype") == "float32" and choice.get("scores"):
        fields["nonzero"] = NONZERO
    fields.setdefault("value_dim", fields.get("head_dim", Case.head_dim))
    of_placement = {name: fields.pop(name) for name in _OF_PLACEMENT & fields.keys()}
    return Case(**fields), Placement(**of_placement)


def _mixture(choice: Choice, number: int, cover: int, turns: Counter[tuple[int, str, int]]) -> Point:
    """The mixture of these levels. `turns` counts by dtype, factor and level the mixtures so far, and this one too."""
    keys = {factor: (choice["dtype"], factor, one) for factor, one in choice.items()}
    case, placement = _call(choice, {factor: turns[key] for factor, key in keys.items()})
    turns.update(keys.values())
    case = dataclasses.replace(case, name=f"{number:02}-{case.dtype}-d{case.head_dim}")
    times = (LENGTHS_ON_ONE_RANK if placement.ring == 1 else LATER_LENGTHS) if cover else 1
    less = 0 if placement.layout == "zigzag" else placement.ring
    lengths = {name: times * getattr(case, name) - less for name in ("q_length", "kv_length")}
    case = dataclasses.replace(case, **lengths)
    return Point(case, dataclasses.replace(placement, check_vma=number % 2 == 0), FULL if cover else CORE)


def _targets(allowed: Mapping[str, list[int]]) -> set[Target]:
    """What a cover must meet: all pairs of levels of two factors, and all triples of masks, that are possible."""
    pairs = itertools.combinations([(factor, one) for factor, levels in allowed.items() for one in levels], 2)
    on = [(factor, levels[1]) for factor in MASKS if len(levels := allowed[factor]) > 1]
    everywhere = _without_choice(allowed)
    every = itertools.chain(pairs, itertools.combinations(on, 3))
    return {
        frozenset(one)
        for one in every
        if len(dict(one)) == len(one) and dict(one).keys() != _ENOUGH_APART and _possible(everywhere | dict(one))
    }


def _triples(allowed: Mapping[str, list[int]], factors: Sequence[str], options: Sequence[str]) -> set[Target]:
    """The triples of a level of these factors (of the ring: one rank), a dtype, and an option that is on."""
    places = [(factor, one) for factor in factors for one in allowed[factor] if factor != "ring" or one == RING_OF_ONE]
    on = [(factor, allowed[factor][1]) for factor in options if len(allowed[factor]) > 1]
    every = itertools.product(places, [("dtype", one) for one in allowed["dtype"]], on)
    everywhere = _without_choice(allowed)
    return {frozenset(one) for one in every if len(dict(one)) == 3 and _possible(everywhere | dict(one))}


def _without_choice(allowed: Mapping[str, list[int]]) -> Choice:
    """The levels that every mixture has, because they are the only ones of their factors."""
    return {factor: levels[0] for factor, levels in allowed.items() if len(levels) == 1}


def _compiles_fast(target: Choice) -> bool:
    return all(target.keys() <= {factor, *FIRST_PARTNERS[factor]} for factor in FIRST_PARTNERS if target.get(factor))


def _possible(choice: Choice) -> bool:
    """Whether a mixture may have these levels together: core accepts them, each has an effect, and queries see keys."""
    level = {factor: FACTORS[factor][number] for factor, number in choice.items()}
    ring = level.get("ring", {}).get("ring", 4)
    # A chunk is causal anyway. On one rank, where few mixtures are causal, `causal` must have an effect of its own.
    if ring == 1 and level.get("causal") and level.get("chunk"):
        return False
    two_way = level.get("two ways")
    if ring == 1 and level.get("layout", {}).get("layout", "contiguous") != "contiguous":
        return False
    if two_way and (not 2 < ring < 8 or level.get("heads", {}).get("kv_heads", 2) % 2):
        return False
    if sum(bool(level.get(factor)) for factor in MASKS) > MOST_MASKS:
        return False
    # `precision` is about products of float32 alone.
    return not (level.get("precision") and level.get("dtype", {}).get("dtype", "float32") != "float32")


def _filled(
    allowed: Mapping[str, list[int]],
    ordered: list[Target],
    missing: frozenset[Target],
    draw: random.Random,
    triples: bool,
) -> Choice:
    """A choice that begins with a missing target, and takes for each factor in turn the level that meets most.

    That is most pairs or, if `triples`, most of the triples that the choice may still meet.
    """

    def gain(factor: str, one: int) -> int:
        if triples:
            return sum((factor, one) in target and _agree(choice, dict(target)) for target in missing)
        return sum(frozenset({(factor, one), other}) in missing for other in choice.items())

    choice = _without_choice(allowed) | dict(draw.choice(ordered))
    factors = [factor for factor in allowed if factor not in choice]
    draw.shuffle(factors)
    for factor in factors:
        possible = [one for one in allowed[factor] if _possible(choice | {factor: one})]
        gains = {one: gain(factor, one) for one in possible}
        equal = [one for one in possible if gains[one] == max(gains.values())]
        choice[factor] = equal[0] if factor in CHEAPEST_FIRST else draw.choice(equal)
    return choice


def _agree(choice: Choice, target: Choice) -> bool:
    return all(choice.get(factor, one) == one for factor, one in target.items())


def _met(choice: Choice, missing: frozenset[Target]) -> frozenset[Target]:
    """The missing targets that the choice has: pairs, triples of masks, options by size, and triples on one rank."""
    masks = [(factor, choice[factor]) for factor in MASKS if choice.get(factor)]
    # Both hide the right side of a window, so a window beside them is not met.
    hidden = "window" if choice.get("causal") or choice.get("chunk") else None
    dtype = ("dtype", choice["dtype"])
    on = [(factor, 1) for factor in OPTIONS if choice.get(factor) and factor != hidden]
    by_size = (((factor, choice[factor]), dtype, option) for factor in ("head size", "heads") for option in on)
    sets = itertools.chain(itertools.combinations(choice.items(), 2), itertools.combinations(masks, 3), by_size)
    if choice["ring"] == RING_OF_ONE:
        place = ("ring", RING_OF_ONE)
        sets = itertools.chain(sets, ((place, dtype, option) for option in choice.items() if option[0] != hidden))
    return frozenset(map(frozenset, sets)) & missing
