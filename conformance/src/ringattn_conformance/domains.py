# SPDX-License-Identifier: Apache-2.0
"""Draws calls by a seed, from the domains of all options and sizes that `domains.json` lists, edges included.

A kernel may be wrong for some values only: a chunk above 64, a third key head, the last key of 65. So each
option is drawn from its whole range. Half of the lengths are edges, and half are drawn uniformly. Most calls run on one
rank, where they compile fast; for long ones only the forward pass is compared. `cases.json` holds the calls that were
drawn for a release; every run adds calls drawn from a seed, by default today's date.
"""

import math
import random
from typing import Any, Final

from .cases import load

Entry = dict[str, Any]
"""A call as `cases.json` has it."""

_TABLE: Final = load("domains.json")
SIZES: Final[dict[str, tuple[Any, ...]]] = _TABLE["sizes"]
OPTIONS: Final[dict[str, tuple[Any, ...]]] = _TABLE["options"]
BESIDE: Final[dict[str, dict[str, tuple[Any, ...]]]] = _TABLE["beside"]
"""For an option: the further options that are drawn whenever a call has it, with their values."""
NARROW: Final = (0, 1, (0, 1), (0, None), (None, 0))
MASKS: Final = ("window", "chunk", "segments", "positions", "ranges", "selected", "builder", "dense_mask")
MOST_MASKS: Final = 2
MASKS_OF_HEADS: Final = {"of-heads": 7, "thirds": 3}
"""How many different masks a builder makes for different heads."""
FAR_APART: Final = ("soft_cap", "scale", "slopes")
"""Options that can put some scores far above the others."""
LARGE_BIAS: Final = 256.0
"""The largest offset of a bias in half precision."""
SHARE: Final = 0.3
"""The probability that a call has any one option."""
SHARE_OF_ONE_QUERY: Final = 0.5
"""The same for calls of a single query, which cost little."""
MANY: Final = 2000
"""Longer sequences count as long: with several queries, the last keys then matter only if all keys are seen and have
similar scores."""
RINGS: Final = (1, 1, 1, 2, 3, 4, 8)
LAYOUTS: Final = ("contiguous", "zigzag", "striped")
LONGEST: Final = 700
"""The longest sequence that is drawn uniformly."""
SCORES: Final = 2**21
"""The most scores of a call: batch rows times heads times queries times keys."""
SCORES_WITH_GRADIENTS: Final = 2**18
"""The most scores of a call with gradients; every second call is drawn with at most as many."""
ELEMENTS: Final = 2**22
"""The most elements of queries, keys or values."""


def draw(seed: int) -> Entry:
    """One call, drawn with the seed."""
    rng = random.Random(seed)
    entry: Entry = {"seed": seed & 0xFFFFFFFF, "ring": 1, "layout": "contiguous", "check_vma": bool(seed % 2)}
    sizes = {name: rng.choice(values) for name, values in SIZES.items()}
    single = sizes["lengths"][0] == 1
    on = [name for name in OPTIONS if rng.random() < (SHARE_OF_ONE_QUERY if single else SHARE)]
    for mask in rng.sample(masks := [name for name in MASKS if name in on], len(masks))[MOST_MASKS:]:
        on.remove(mask)
    for name in on:
        entry[name] = rng.choice(OPTIONS[name])
        for other, values in BESIDE.get(name, {}).items():
            entry[other] = rng.choice(values)
    reach = max(_reach(entry.get("window")), _reach(entry.get("chunk")))
    sizes["lengths"] = rng.choice([one for one in SIZES["lengths"] if max(one) > reach and (one[0] == 1) is single])
    if not single and rng.random() < 0.5 and max(sizes["lengths"]) <= MANY:
        entry |= _placed(sizes, reach, rng)
    if max(sizes["lengths"]) > MANY and (not single or rng.random() < 0.5):
        entry = {name: x for name, x in entry.items() if name not in (*MASKS, *FAR_APART)} | {"dropout": 0.5}
        sizes["dtype"] = "float32"
        if single:
            entry["positions"] = "at-the-end"
    elif single:  # at 0 a causal query would see one key
        entry.setdefault("positions", rng.choice(("at-the-end", "among-keys")))
    if least := MASKS_OF_HEADS.get(entry.get("builder", "")):
        sizes["heads"] = rng.choice([one for one in SIZES["heads"] if one[0] >= least])
    if isinstance(sides := entry.get("window"), tuple) and 2**31 - 1 in sides:
        entry["positions"] = "extreme"  # position minus window is below int32
    most = max(rng.choice((SCORES, SCORES_WITH_GRADIENTS)), math.prod(sizes["lengths"]))
    return _with_effect(entry | _fitting(sizes, rng, most))


def _placed(sizes: dict[str, Any], reach: int, rng: random.Random) -> Entry:
    """Draws a ring and a layout, and replaces the lengths by uniformly drawn ones that the ring divides."""
    ring, layout = rng.choice(RINGS), rng.choice(LAYOUTS)
    layout = layout if ring > 1 else LAYOUTS[0]
    parts = ring * (2 if layout == "zigzag" else 1)
    rows = rng.randint(2, LONGEST)
    columns = rows if rng.random() < 0.5 else rng.randint(2, LONGEST)
    columns = max(columns, min(reach + 1, LONGEST))
    sizes["lengths"] = tuple(-(-length // parts) * parts for length in (rows, columns))
    return {"ring": ring, "layout": layout}


def _reach(x: Any) -> int:
    """The largest window or chunk up to 1000; 0 if there is none. Drawn sequences are made longer than that."""
    numbers = x if isinstance(x, tuple) else (x,)
    return max((number for number in numbers if number and number <= 1000), default=0)


def _fitting(sizes: dict[str, Any], rng: random.Random, most: int) -> Entry:
    """The sizes as fields of `Case`; heads, batch or head sizes are drawn anew until at most `most` scores are left.

    Elements are at most `ELEMENTS`.
    """
    while True:
        (rows, columns), (heads, kv_heads) = sizes["lengths"], sizes["heads"]
        tokens, widest = sizes["batch"] * max(rows, columns), max(sizes["head_dim"], sizes["value_dim"] or 0)
        if sizes["batch"] * heads * rows * columns <= most and tokens * heads * widest <= ELEMENTS:
            break
        name = rng.choice(("heads", "batch", "head_dim", "value_dim"))
        sizes[name] = rng.choice(SIZES[name])
    sizes = {name: x for name, x in sizes.items() if name not in ("lengths", "heads")}
    sizes["value_dim"] = sizes["value_dim"] or sizes["head_dim"]
    return sizes | {"q_length": rows, "kv_length": columns, "heads": heads, "kv_heads": kv_heads}


def _with_effect(entry: Entry) -> Entry:
    """The call with scores large enough for its options to matter, and without options that cannot be judged.

    A query that sees one key has the probability 1, so its gradient of the score is 0. What a kernel computes there is
    rounding alone: of `delta` in half precision, or of a float32 sum over thousands of such queries. These calls
    therefore compare the forward pass alone.
    """
    half = entry["dtype"] != "float32"
    if cap := entry.get("soft_cap"):
        entry |= {"gain": max(1.0, cap / 2), "lse": True}
        entry.pop("scale", None)
    if abs(entry.get("bias_offset", 0.0)) > LARGE_BIAS and (half or entry.get("bias_dtype") == "bfloat16"):
        entry["bias_offset"] = LARGE_BIAS  # beyond, rounding decides which key has the largest score
    if half:
        entry.pop("precision", None)
    elif entry.get("gain") or entry.get("scale"):
        entry["nonzero"] = 16
    if entry.get("positions") == "extreme" or max(entry["q_length"], entry["kv_length"]) > 5000:
        entry.pop("slopes", None)  # over such distances few keys keep any weight
    few = entry["kv_length"] < 4 or entry.get("chunk", 9) < 9 or entry.get("window") in NARROW
    few = few or entry.get("selected_size", 9) < 9
    overflowing = entry["dtype"] == "float16" and entry.get("gain", 1.0) > 50
    scores = entry["batch"] * entry["heads"] * entry["q_length"] * entry["kv_length"]
    if scores > SCORES_WITH_GRADIENTS or overflowing or (few and (half or entry["q_length"] > 2000)):
        entry["forward"] = True
        entry.pop("fused_backward", None)
    return {name: x for name, x in entry.items() if x is not None}


def today(seed: int) -> list[Entry]:
    """The calls that `seed` (a date) draws: 4 in the core tier, 8 more in full, 48 more in exhaustive."""
    tiers = ["core"] * 4 + ["full"] * 8 + ["exhaustive"] * 48
    return [{"name": f"today-{number}", "tier": tier} | draw(1000 * seed + number) for number, tier in enumerate(tiers)]
