# SPDX-License-Identifier: Apache-2.0
"""A call analysis as tables and sentences: printed as text, or as JSON, by `ringattn explain`."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final

from .analysis import CallAnalysis
from .output import Bytes, Rows, Title, show

HIDDEN: Final = ("call", "hops", "states", "not_possible", "prefill", "shard")
"""The fields of an analysis that JSON leaves out, or has under other names."""
COLUMNS: Final = 9
"""The table of tiles has a column for each rank up to this number of ranks; with more ranks, it has their extremes."""


def report(found: CallAnalysis, picture: str) -> None:
    """Prints the whole analysis, with `picture` above the table of tiles."""
    grid = "{} x {} tiles of {} queries by {} keys".format(*found.states.shape[2:], *found.tile)
    show(
        Title(title(found)), described(found), "",
        Title(f"Backends on {found.platform}"), found.backends, *_of_backend(found), "",
        Title(f"Tiles that each rank computes at each hop ({grid} a hop)"),
        "A kernel chooses its own tile size; --tile sets the size that is shown.", picture,
        tiles(found), *_of_tiles(found), "",
        Title("Sent by each rank"), *([found.sent] if found.sent else []), totals(found), "",
        Title("Memory of one device"), found.memory, _of_memory(found), *_of_prefill(found),
    )  # fmt: skip


def as_json(found: CallAnalysis, full: bool = False) -> dict[str, Any]:
    """Plain data. With `full`, the table of tiles has a row for each hop and a column for each rank."""
    plain = {name: value for name, value in vars(found).items() if name not in HIDDEN}
    shapes = {name: x.shape for name, x in found.call.floating.items()}
    call = shapes | {"ring": found.ranks, "dtype": _dtype(found), "layout": _layout(found)} | found.call.said
    totals = {"tiles_of_ranks": found.tiles_of_ranks, "tiles_of_slowest": found.tiles_of_slowest}
    prefill = {"prefill": found.prefill} if found.prefill else {}
    return {"call": call, **plain, "tiles": tiles(found, full), **totals, **prefill}


def title(found: CallAnalysis) -> str:
    """The call in one line: shapes, dtype, ring and layout."""
    query, key, value = (found.call.floating[name].shape for name in ("query", "key", "value"))
    shapes = f"query {'x'.join(map(str, query))}, key {'x'.join(map(str, key[1:]))}"
    values = "" if value[3] == key[3] else f", values of {value[3]}"
    ring = "one device" if found.ranks == 1 else f"a ring of {found.ranks}"
    return f"{shapes}{values}, {_dtype(found)}: {ring}, {_layout(found)}"


def _dtype(found: CallAnalysis) -> str:
    return found.call.floating["query"].dtype.name


def _layout(found: CallAnalysis) -> str:
    return found.call.options["layout"]


def described(found: CallAnalysis) -> str:
    """The options that differ from their defaults, and the number of tokens that each rank holds, as text."""
    queries, keys = found.lengths
    said = [f"{name.replace('_', ' ')} {_plain(value)}".rstrip() for name, value in found.call.said.items()]
    whole = tuple(found.call.floating[name].shape[1] for name in ("query", "key"))
    padded = (queries * found.ranks, keys * found.ranks) != whole
    needs = " (which needs SEGMENT_IDS)" if "SEGMENT_IDS" in found.needs and "documents" not in found.call.said else ""
    holds = f"each rank holds {queries} queries and {keys} keys" + (f", with padding{needs}" if padded else "")
    return f"{', '.join(said) or 'no mask'}; {holds}"


def _plain(value: Any) -> str:
    if value is True:
        return ""
    return ",".join("-" if x is None else str(x) for x in value) if isinstance(value, tuple) else str(value)


def _of_backend(found: CallAnalysis) -> Iterator[str]:
    if found.refusal:
        yield f"none: {found.refusal}"
    if found.own_ring:
        yield f"{found.choice} drives its own ring; below is what core's engine would do."
    if found.strategy != "ring":
        yield f"The call takes {found.strategy!r}; the tables of hops, sends and memory are those of 'ring'."


def tiles(found: CallAnalysis, full: bool = False) -> Rows:
    """The tiles that ranks compute at each hop.

    With `full`, or if there are few ranks, a row for each hop and a column for each rank. Else the columns are the
    extremes, and consecutive hops with equal extremes are one row.
    """
    full = full or found.ranks <= COLUMNS

    def row(hop: Any, keys: str, counts: Sequence[int], busiest: int) -> dict[str, Any]:
        shown: dict[str, Any] = {"least": min(counts), "mean": f"{sum(counts) / len(counts):.1f}"}
        if full:
            shown = {f"rank {number}": count for number, count in enumerate(counts)}
        return {"hop": hop, "keys of": keys, **shown, "busiest": busiest}

    pairs = zip(found.hops, found.tiles.tolist(), strict=True)
    rows = [row(hop.number, hop.keys_of, counts, max(counts)) for hop, counts in pairs]
    runs = [[one] for one in rows] if full else [list(run) for _, run in groupby(rows, lambda x: list(x.values())[2:])]
    for first, *_, last in (run for run in runs if len(run) > 1):
        first |= {name: f"{first[name]} to {last[name]}" for name in ("hop", "keys of")}
    return [*(run[0] for run in runs), row("sum", "", found.tiles_of_ranks, found.tiles_of_slowest)]


def _of_tiles(found: CallAnalysis) -> Iterator[str]:
    yield balance(found)
    if len(found.shard.hops.sizes) > 1:
        inner, groups = found.shard.hops.sizes
        yield (
            f"The ring has two levels: keys go round the {inner} ranks r of a group, and meanwhile the next keys come "
            f"from the group before, of {groups} groups g."
        )
    if found.skipped:
        runs = [[x for _, x in run] for _, run in groupby(enumerate(found.skipped), lambda pair: pair[1] - pair[0])]
        lost = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        made = f"{len(found.hops) - 1} of {found.ranks - 1} sends are made"
        yield f"{made}: no query sees the keys that are {lost} ranks away."


def balance(found: CallAnalysis) -> str:
    """A sentence: how many tiles are computed, and how evenly the ranks share them."""
    work, total = sum(found.tiles_of_ranks), found.states[:, 0].size * found.ranks
    computed = f"{100 * work / total:.0f}% of all {total} tiles are computed."
    if found.ranks == 1 or not work:
        return computed
    busy = f"{100 * work / (found.tiles_of_slowest * found.ranks):.0f}%"
    return f"{computed} Each hop waits for its busiest rank: counted in tiles, ranks are busy {busy} of the time."


def totals(found: CallAnalysis) -> str:
    """Sentences: how many bytes each rank sends, and gathers before the first hop."""
    if not found.sent:
        return "Nothing is sent."
    forward, backward = (
        Bytes(sum(row["times"] * row["bytes"] for row in found.sent if row["pass"] == phase))
        for phase in ("forward", "backward")
    )
    sent = f"Each rank sends {forward} in the forward pass and {backward} in the backward pass."
    ids = f"Before the first hop each rank gathers {Bytes(found.gathered)} of ids and positions."
    return f"{sent} {ids}" if found.gathered else sent


def _of_memory(found: CallAnalysis) -> str:
    counted = "Each array is counted once, without the workspace of the kernel and without what XLA copies or shares."
    if found.compiled is None:
        return f"{counted} --compile asks XLA for its own figure."
    named = {"forward": found.compiled["forward"], "forward and backward": found.compiled["both"]}
    said = [f"{Bytes(count)} {name}" for name, count in named.items() if count is not None]
    planned = f"Temporary memory as XLA plans it on {found.compiled['devices']}"
    return f"{counted} {planned}: {', '.join(said) or 'no figure'}."


def _of_prefill(found: CallAnalysis) -> Iterator[Any]:
    if found.prefill:
        (taken,) = (row["send"] for row in found.prefill if row["chosen"])
        yield ""
        yield Title("The same queries by prefill_attention: bytes that each rank sends")
        yield found.prefill
        yield f"By default it sends the {taken}, which is fewer bytes. Only send='keys' has gradients."
