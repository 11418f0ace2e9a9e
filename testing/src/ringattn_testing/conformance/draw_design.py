# SPDX-License-Identifier: Apache-2.0
"""Computes the covering design: prints entries for `design` of `cases.json`.

    python -m ringattn_testing.conformance.draw_design SEED
    python -m ringattn_testing.conformance.draw_design SEED OPTION

The core tier gets calls until every option meets every class of a size, the full tier more until every two levels of
two factors have met. Each call is the best of some that are drawn at random around a pair that has not met: it brings
the most new pairs. An option brings pairs only where it matters (`effects`).

With a new OPTION the design that `cases.json` has stays: the option joins those of its calls in which all others still
matter, and new calls bring the pairs that are then left.
"""

import functools
import json
import random
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from ringattn_conformance import domains, tiers
from ringattn_conformance.cases import ENTRIES, Case, of_entry
from ringattn_conformance.factors import BESIDE, BY_CLASS, OPTIONS, SIZES, Level, levels_of, options_of
from ringattn_conformance.lattice import LAYOUTS
from ringattn_conformance.ranks import Placement

from ringattn_testing.conformance.effects import matters

Entry = dict[str, Any]
Pair = frozenset[Level]

MASKS: Final = ("causal", "window", "chunk", "segments", "ranges", "selected", "builder", "dense_mask")
MOST_MASKS: Final = 4
OPTION_OF: Final = {name: option for option, more in BESIDE.items() for name in more}
"""The option that each further option is beside."""
MOST_SCORES: Final = {tiers.CORE: 280_000, tiers.FULL: 2**19}
"""The most scores of a call: kernels are interpreted in the core tier, too."""
FIRST_SEED: Final = 490_000
TRIES: Final = 16
"""How many calls are drawn around each pair; the best is kept."""
PATIENCE: Final = 40
"""How many rounds may fail to bring a pair together before it is given up and reported."""
OF_CHOSEN: Final = ("dtype", "q_length", "kv_length", "lengths", "group", "kv_heads", "ring", "layout", "groups")
"""The factors that how `selected` is given (`BESIDE`) has to do with. What is chosen meets all others."""
LONG: Final = ("multiple of 512", "above 512")
"""Classes of lengths whose calls have one head and one batch row where as many queries meet as many keys."""
FEW_KEYS: Final = 300
"""How many keys of a rank are few: several ranks of queries then fit beside them."""
ODD: Final = ("1", "one less than a tile")
"""Classes of lengths that hold odd ones alone, which zigzag order cannot halve."""
BOUNDS: Final[dict[Level, tuple[str, ...]]] = {
    ("causal", "True"): ("last", "both"), ("window", "(None, 6)"): ("last", "both"),
    ("window", "(40, None)"): ("first", "both"),
    **{("window", window): ("both",) for window in ("5", "(17, 4)", "(90, 0)", "(64, 0)")},
    **{(option, str(x)): ("both",) for option in ("chunk", "ranges") for x in OPTIONS[option]},
    **{("builder", builder): () for builder in OPTIONS["builder"]},
}  # fmt: skip
"""The bounds that a call with a mask can have; with other options it can have any."""
OF_BOUNDS: Final = {"none": (), "first": ("window",), "last": ("causal", "window")}
"""The masks by position that leave a call these bounds alone."""
NEVER: Final[dict[str, tuple[tuple[Level, Level], ...]]] = {
    "products of half precision are exact": tuple(
        (("precision", level), ("dtype", dtype))
        for level in map(str, ("", *OPTIONS["precision"])) for dtype in ("float16", "bfloat16")
    ),
    "scores near zero are neither capped nor scaled": tuple(
        ((option, level), ("scores", scores))
        for option in ("soft_cap", "scale") for level in map(str, OPTIONS[option]) for scores in ("equal", "small")
    ),
    "usual scores are far below this cap": ((("soft_cap", "30.0"), ("scores", "usual")),),
    "a chunk is causal, and shorter than this window": tuple(
        (("chunk", str(chunk)), other)
        for chunk in OPTIONS["chunk"]
        for other in (("causal", "True"), *(("window", window) for window in ("(90, 0)", "(64, 0)", "(None, 6)")))
    ),
    "a chunk is shorter than what this window lets a query see": ((("chunk", "20"), ("window", "(40, None)")),),
    "the window is causal, or causality is stricter": tuple(
        (("causal", "True"), ("window", window)) for window in ("(90, 0)", "(64, 0)", "(None, 6)")
    ),
    "no query sees a key that this window forbids": (
        (("builder", "algebra"), ("window", "(None, 6)")), (("kv_length", "1"), ("window", "(None, 6)")),
    ),
    "positions alone change nothing": tuple(
        (("options", "one"), ("positions", positions)) for positions in OPTIONS["positions"]
    ),
    "with one head no sink is left": tuple((("sinks", "closed"), ("lengths", length)) for length in LONG),
    "the only block is chosen": tuple(
        (("kv_length", "1"), ("selected", selected)) for selected in ("newest", "few")
    ),
    "the calls would take too long": (
        (("ring", "8"), ("lengths", "multiple of 128")), (("ring", "8"), ("kv_length", "above 2048")),
        (("ring", "8"), ("lengths", "one less than a tile")),
        *((("layout", layout), ("lengths", length)) for layout in SIZES["layout"] for length in LONG),
    ),
}  # fmt: skip
"""Pairs of levels that cannot meet with effect, by the reason."""
_NEVER: Final = {frozenset(pair) for some in NEVER.values() for pair in some}
MASKS_OF_HEADS: Final = domains.MASKS_OF_HEADS


def wanted(tier: str) -> set[Pair]:
    """Every pair that a tier has: of an option and a class of a size in core, of any two levels in full."""
    on = {(option, str(x)) for option, values in OPTIONS.items() for x in values}
    on |= {(name, str(x)) for more in BESIDE.values() for name, values in more.items() for x in values}
    sizes = {(factor, level) for factor, levels in SIZES.items() for level in levels}
    if tier == tiers.CORE:
        some = {(option, "") for option in OPTIONS} | {("options", "none")}
        classes = {level for level in sizes if level[0] in (*BY_CLASS, "dtype", "layout", "bounds")}
        found = {frozenset({one, other}) for one in some for other in classes if possible(one, other)}
        own = {(name, str(x)) for more in BESIDE.values() for name, values in more.items() for x in values}
        found |= {frozenset({one, ("options", "some")}) for one in on}
        return found | {frozenset({one, other}) for one in own for other in classes if other[0] == "dtype"}
    every = {*on, *sizes}
    found = {frozenset({a, b}) for a in every for b in every if a[0] != b[0] and possible(a, b)}
    bare = {size for size in sizes if size[0] not in ("ring", "layout", "scores", "bounds")}
    found |= {frozenset({("options", "none"), size}) for size in bare}
    alone = ("options", "one")
    return found | {frozenset({alone, one}) for one in on if one[0] in OPTIONS and possible(alone, one)}


def possible(one: Level, other: Level) -> bool:
    """Whether two levels can meet in a call, with effect."""
    if frozenset({one, other}) in _NEVER:
        return False
    for (a, x), (b, y) in ((one, other), (other, one)):
        if {a, b} == {"q_length", "kv_length"} and a == "kv_length" and x == "above 2048" and y not in ("1", "2 to 8"):
            return False
        if a == "ring" and b == "layout" and x == "1":
            return False
        if a == "selected_size" and (b, y) == ("layout", "striped") and x != "1":
            return False  # a block is on one rank
        if OPTION_OF.get(a) == "selected" and b not in (*OF_CHOSEN, OPTION_OF[a]):
            return False
        if a == "groups" and (x, b, y) in (("K", "kv_heads", "one"), ("N", "group", "1")):
            return False
        if a == "groups" and x != "1" and b == "lengths" and y in LONG:
            return False
        if a == "layout" and x == "zigzag" and b in ("q_length", "kv_length", "lengths") and y in ODD:
            return False
        if a == "bounds" and (b not in (*OPTIONS, "dtype") or x not in _bounds_with(b, y)):
            return False
        if a == "kv_length" and x == "1" and not _with_one_key(b, y):
            return False
        if a == "segments" and x == "packed" and b == "kv_length" and y == "above 2048":
            return False
        if a == "ring" and int(x) > 2 and b in ("q_length", "lengths") and y in LONG:
            return False
        if a == "lengths" and b in ("q_length", "kv_length"):
            return False
        if a == "lengths" and x in LONG and b in ("batch", "group", "kv_heads", "ring") and y not in ("1", "one"):
            return False  # the calls would take too long; with few keys, as many queries meet each of these
    return True


def _bounds_with(option: str, level: str) -> tuple[str, ...]:
    """The bounds that a call with this level of an option can have; with `level` "" it has some level of it."""
    levels = [str(x) for x in OPTIONS.get(option, ()) if level in ("", str(x))]
    every = tuple(SIZES["bounds"])
    return every if not levels else tuple({one for x in levels for one in BOUNDS.get((option, x), every)})


def _with_one_key(factor: str, level: str) -> bool:
    """Whether a level matters where there is one key: nothing depends on scores there but the lse."""
    return not (factor == "builder" or factor == "dropout" or (factor == "scores" and level == "small"))


def pairs(case: Case, placement: Placement, tier: str, without: frozenset[str] = frozenset()) -> Iterator[Pair]:
    """The pairs that a call brings to a tier; `without` has options of it without effect."""
    levels = {one for one in levels_of(case, placement) if one[0] not in without}
    levels = {one for one in levels if OPTION_OF.get(one[0]) not in without}
    for a in levels:
        for b in levels:
            if a[0] >= b[0]:
                continue
            yield frozenset({a, b})
            for one, other in ((a, b), (b, a)):
                if tier == tiers.CORE and one[0] in OPTIONS:
                    yield frozenset({(one[0], ""), other})


class Draw:
    """Draws calls around pairs: level by level, and most often one that has pairs to meet with the levels so far."""

    def __init__(self, seed: int) -> None:
        self.rng, self.count = random.Random(seed), 0
        self.missing: set[Pair] = set()
        self.chosen: list[Level] = []
        self.around: Pair = frozenset()

    def worth(self, factor: str, level: str) -> int:
        """How many pairs of this level and the levels so far have not met."""
        ways = (level, "") if factor in OPTIONS else (level,)
        every = [*self.chosen, *((name, "") for name, _ in self.chosen if name in OPTIONS)]
        return sum(frozenset({(factor, way), other}) in self.missing for way in ways for other in every)

    def among(self, factor: str, levels: Any) -> Any:
        """One of the levels of a factor."""
        names = list(levels)
        name = self.rng.choices(names, [0.1 + self.worth(factor, str(name)) ** 2 for name in names])[0]
        self.chosen.append((factor, str(name)))
        return name

    def likely(self, option: str) -> float:
        """The weight of an option that no pair asks for."""
        return 0.2 + max(self.worth(option, str(x)) for x in OPTIONS[option])

    def suits(self, mask: str, bounds: str | None) -> bool:
        """Whether a call with these bounds may have the mask."""
        by_position = ("causal", "window", "chunk", "ranges", "builder")
        return mask not in by_position or bounds is None or mask in OF_BOUNDS.get(bounds, by_position[:-1])

    def level_of(self, option: str, values: Any) -> Any:
        return {str(x): x for x in values}[self.among(option, map(str, values))]

    def sizes(self, fixed: dict[str, str], tier: str) -> Entry | None:
        rng = self.rng
        level = dict(fixed)
        if level.get("lengths") in LONG:
            level = {"batch": "1", "group": "1", "kv_heads": "one", "ring": "1"} | level
        for factor in rng.sample(list(SIZES), len(SIZES)):
            if factor not in level:
                level[factor] = self.among(factor, SIZES[factor])
        if "ring" not in fixed and ("layout" not in fixed) and rng.random() < 0.75:
            level["ring"] = "1"
        if "layout" in fixed and level["ring"] == "1":
            level["ring"] = rng.choice("248")
        if "scores" not in fixed and rng.random() < 0.5:
            level["scores"] = "usual"
        if "kv_length" not in fixed and level["kv_length"] == "above 2048" and level["q_length"] not in ("1", "2 to 8"):
            level["kv_length"] = rng.choice(["multiple of 64", "ragged above 64", "multiple of 128"])
        ring, layout = SIZES["ring"][level["ring"]], level["layout"]
        layout = layout if ring > 1 else "contiguous"
        rows, columns = (rng.choice(SIZES[name][level[name]]) for name in ("q_length", "kv_length"))
        chosen = int(dict(self.around).get("selected_size", 1))
        if chosen > 1 and ring > 1 and "kv_length" not in fixed:  # no block is on two ranks
            layout = layout if layout == "zigzag" else LAYOUTS[0]
            parts = chosen * (2 if layout == "zigzag" else 1)
            whole = [n for some in SIZES["kv_length"].values() for n in some if n % parts == 0 and n < FEW_KEYS]
            columns = rng.choice(whole or [columns])
            rows = rng.choice(SIZES["q_length"]["2 to 8"]) if "q_length" not in fixed else rows
        elif "lengths" in fixed or (not {"q_length", "kv_length"} & fixed.keys() and rng.random() < 0.5):
            of_class = [level["lengths"], *(["multiple of 128"] if level["lengths"] in LONG else [])]
            rows = columns = rng.choice(SIZES["lengths"][of_class[0 if "lengths" in fixed else -1]])
        if layout == "zigzag" and (rows % 2 or columns % 2):
            return None
        kv_heads, group = rng.choice(SIZES["kv_heads"][level["kv_heads"]]), SIZES["group"][level["group"]]
        head_dim, batch = SIZES["head_dim"][level["head_dim"]], SIZES["batch"][level["batch"]]
        of_value = SIZES["value_dim"][level["value_dim"]]
        entry = {"ring": ring, "layout": layout, "dtype": level["dtype"], "batch": batch, "q_length": ring * rows,
                 "kv_length": ring * columns, "heads": group * kv_heads, "kv_heads": kv_heads, "head_dim": head_dim,
                 "value_dim": of_value[level["head_dim"]] if of_value else head_dim,
                 **SIZES["scores"][level["scores"]]}  # fmt: skip
        tokens = batch * ring * max(rows, columns) * group * kv_heads * max(head_dim, entry["value_dim"])
        scores = batch * group * kv_heads * ring**2 * rows * columns
        return entry if scores <= MOST_SCORES[tier] and tokens <= 2**21 else None

    def options(self, fixed: dict[str, str], entry: Entry, bare: str | None, tier: str) -> Entry | None:
        """Adds options: those of `fixed` and some more."""
        rng = self.rng
        on = [name for name in OPTIONS if name in fixed]
        on += {OPTION_OF[name] for name in fixed if name in OPTION_OF} - {*on}
        bounds = dict(self.around).get("bounds")
        among = [name for name in MASKS if self.suits(name, bounds)]
        if bare is None:
            masks = rng.randint(1, MOST_MASKS)
            few = sorted(among, key=lambda name: rng.random() / self.likely(name))[:masks]
            rest = [name for name in OPTIONS if name not in MASKS]
            others = sorted(rest, key=lambda name: rng.random() / self.likely(name))[: rng.randint(4, 9)]
            on += [name for name in (*few, *others) if name not in on]
        if len([name for name in on if name in MASKS]) > MOST_MASKS:
            return None
        if entry["dtype"] != "float32" and "precision" in on:
            if "precision" in fixed:
                return None
            on.remove("precision")
        for name in on:
            values = OPTIONS[name]
            chosen = [x for x in values if str(x) == fixed.get(name, "")] or list(values)
            chosen = [x for x in chosen if bounds in (None, *BOUNDS.get((name, str(x)), (bounds,)))] or chosen
            entry[name] = chosen[0] if len(chosen) == 1 else self.level_of(name, chosen)
            for more, choices in BESIDE.get(name, {}).items():
                chosen = [x for x in choices if str(x) == fixed.get(more, "")] or list(choices)
                entry[more] = self.level_of(more, [x for x in chosen if fits(entry | {more: x})] or chosen)
        if not fits(entry):
            return None
        if entry["kv_length"] == 1 and bare is None:
            entry["lse"] = True
        if "soft_cap" in entry and "gain" not in entry:
            entry["gain"] = max(1.0, entry["soft_cap"] / 2)
            if bare is not None or fixed.get("scores") == "usual":
                return None if "scores" in fixed else entry
        if entry.get("segments") == "packed" and entry["kv_length"] > entry["q_length"]:
            return None
        if entry["heads"] < MASKS_OF_HEADS.get(entry.get("builder", ""), 1) and "builder" in fixed and "heads" in fixed:
            return None
        if entry["dtype"] == "float32" and entry.get("gain", 1.0) > 1 and entry["head_dim"] > 16:
            entry["nonzero"] = 16
        return {name: x for name, x in entry.items() if x is not None}

    def call(self, pair: Pair, tier: str) -> Entry | None:
        fixed, self.chosen, self.around = dict(pair), list(pair), pair
        bare = fixed.pop("options", None)
        bare = None if bare == "some" else bare
        if tier == tiers.CORE:
            fixed = {name: x or str(self.rng.choice(OPTIONS[name])) for name, x in fixed.items()}
        if bare is not None and any(name in OPTION_OF for name in fixed):
            return None
        entry = self.sizes({name: x for name, x in fixed.items() if name in SIZES}, tier)
        if entry is None:
            return None
        if bare is not None and tier == tiers.FULL and "ring" not in fixed:
            entry |= {"q_length": entry["q_length"] // entry["ring"], "kv_length": entry["kv_length"] // entry["ring"],
                      "ring": 1, "layout": "contiguous"}  # fmt: skip
        return self.options({name: x for name, x in fixed.items() if name not in SIZES}, entry, bare, tier)


def placed(entry: Entry) -> tuple[Case, Placement]:
    return of_entry({"name": "drawn"} | entry), Placement(entry["ring"], entry["layout"])


def fits(entry: Entry) -> bool:
    """Whether the ring divides the sequences of a call, and no block of chosen keys is on two ranks."""
    case, placement = placed(entry)
    return case.fits(placement.ring, placement.layout)


def cost(entry: Entry) -> float:
    """About how many seconds a call takes: rings compile longest."""
    return 2.0 + 0.12 * sum(name in OPTIONS for name in entry) + (0 if entry["ring"] == 1 else 4.0)


class Chosen(NamedTuple):
    """A call of the design, and its options without effect."""

    entry: Entry
    without: frozenset[str]

    def pairs(self, tier: str) -> set[Pair]:
        return set(pairs(*placed(self.entry), tier, self.without))


def best(draw: Draw, seeds: list[Pair], tier: str) -> Chosen | None:
    """Of calls that are drawn around these pairs, the one that brings most missing pairs for its cost."""
    candidates = []
    for target in seeds:
        for _ in range(TRIES):
            entry = draw.call(target, tier)
            found = set() if entry is None else draw.missing.intersection(pairs(*placed(entry), tier))
            if entry is not None and target in found:
                candidates.append((len(found) / cost(entry), len(candidates), entry))
    found = []
    for _, number, entry in sorted(candidates, reverse=True)[: 2 if tier == tiers.CORE else 1]:
        draw.count += 1
        entry["seed"] = FIRST_SEED + draw.count
        one = judged(entry)
        found.append((len(draw.missing & one.pairs(tier)) / cost(entry), number, one))
    worth, _, one = max(found, default=(0.0, 0, None))
    return one if worth else None


def judged(entry: Entry) -> Chosen:
    case, _ = placed(entry)
    return Chosen(entry, frozenset(name for name in options_of(case) if name in OPTIONS and not matters(case, name)))


def with_option(draw: Draw, one: Chosen, option: str, tier: str) -> Chosen:
    """The call with the option too, with levels that bring most missing pairs, if all options that mattered still do.

    A call with one option or none stays as it is: few calls have so few.
    """
    entry = one.entry
    if sum(name in entry for name in OPTIONS) < 2:
        return one
    found = [(0, 0, one)]
    for number in range(1, TRIES + 1):
        draw.chosen = [*levels_of(*placed(entry))]
        more = {option: draw.level_of(option, OPTIONS[option])}
        for name, values in BESIDE.get(option, {}).items():
            more[name] = draw.level_of(name, [x for x in values if fits(entry | more | {name: x})] or values)
        if fits(entry | more):
            new = Chosen(entry | more, one.without)
            found.append((len(draw.missing & new.pairs(tier)), -number, new))
    for worth, _, new in sorted(found, key=lambda one: one[:2], reverse=True)[:4]:
        if worth and (new := judged(new.entry)).without == one.without:
            return new
    return one


def design(seed: int, begun: list[Chosen], option: str | None = None) -> list[Chosen]:
    """The design, or the one that is `begun` with an option more."""
    draw, found = Draw(seed), begun
    draw.count = max((one.entry["seed"] - FIRST_SEED for one in begun if not is_kept(one.entry)), default=0)
    for tier in (tiers.CORE, tiers.FULL):
        draw.missing, failed = wanted(tier), Counter()
        draw.missing.difference_update(*(one.pairs(tier) for one in found))
        for number, one in enumerate(found):
            if option is not None and one.entry["tier"] == tier and option not in one.entry:
                found[number] = with_option(draw, one, option, tier)
                draw.missing -= found[number].pairs(tier)
                print(number, tier, len(draw.missing), file=sys.stderr, flush=True)
        while draw.missing:
            seeds = draw.rng.sample(sorted(draw.missing, key=sorted), min(len(draw.missing), 3))
            one = best(draw, seeds, tier)
            if one is None:
                failed.update(seeds)
                for target in seeds:
                    if failed[target] >= PATIENCE:
                        draw.missing.discard(target)
                        print("given up:", sorted(target), file=sys.stderr, flush=True)
                continue
            draw.missing -= one.pairs(tier)
            one.entry["tier"] = tier
            found.append(one)
            print(len(found), tier, len(draw.missing), file=sys.stderr, flush=True)
        found = needed(found)
    return found


def needed(found: list[Chosen]) -> list[Chosen]:
    """The calls without those whose pairs all meet in other calls of their tier, dear ones tried first."""
    brings = [
        {(tier, pair) for tier in (tiers.CORE, tiers.FULL) if tiers.contains(tier, one.entry["tier"])
         for pair in one.pairs(tier) & wanted_in(tier)}
        for one in found
    ]  # fmt: skip
    count = Counter(pair for some in brings for pair in some)
    kept = [True] * len(found)
    for number in sorted(range(len(found)), key=lambda number: -cost(found[number].entry)):
        if all(count[pair] > 1 for pair in brings[number]) and not is_kept(found[number].entry):
            kept[number] = False
            count.subtract(brings[number])
    return [one for one, keep in zip(found, kept, strict=True) if keep]


def is_kept(entry: Entry) -> bool:
    """Whether a call is in the design for what it caught once, not for its pairs."""
    return entry.get("name", "").startswith("kept-")


@functools.cache
def wanted_in(tier: str) -> set[Pair]:
    return wanted(tier)


if __name__ == "__main__":
    seed, *option = sys.argv[1:]
    begun = [judged(dict(entry)) for entry in ENTRIES["design"]] if option else []
    for number, (entry, _) in enumerate(design(int(seed), begun, *option)):
        name = "-".join([f"{number:03}", *(option for option in OPTIONS if option in entry)])
        head = {"name": entry["name"] if is_kept(entry) else name, "tier": entry["tier"], "seed": entry["seed"]}
        head |= {"check_vma": entry.get("check_vma", bool(number % 2))}
        print(json.dumps(head | {name: x for name, x in entry.items() if name not in head}))
