# SPDX-License-Identifier: Apache-2.0
"""A call analysis as tables and sentences: printed as text, or as JSON, by `ringattn explain`."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final

from .analysis import CallAnalysis, rank
from .output import Rows, Title, amount, show

COLUMNS: Final = 9
"""The table of tiles has a column for each rank up to this number of ranks; with more ranks, it has their extremes."""


def report(found: CallAnalysis, picture: Any) -> None:
    """Prints the whole analysis, with `picture` above the table of tiles."""
    rows, columns = found.states.shape[2:]
    grid = "{} x {} tiles of {} queries by {} keys".format(rows, columns, *found.tile)
    show(
        Title(title(found)), described(found), "", Title(f"Backends on {found.platform}"), found.backends,
        *_of_backend(found), "",
        Title(f"Tiles that each rank computes at each hop ({grid} a hop)"),
        "A kernel chooses its own tile size; --tile sets the size that is shown.", picture,
        tiles(found), *_of_tiles(found), "",
        Title("Sent by each rank"), *([found.sent] if found.sent else []), *_of_sends(found), "",
        Title("Memory of one device"), found.memory, _of_memory(found),
    )  # fmt: skip


def as_json(found: CallAnalysis, full: bool = False) -> dict[str, Any]:
    """Plain data. With `full`, the table of tiles has a column for each rank, however many there are."""
    shapes = {name: x.shape for name, x in found.call.floating.items()}
    named = ("platform", "needs", "backends", "choice", "refusal", "own_ring", "lengths", "tile", "skipped", "sent",
             "gathered", "memory", "compiled")  # fmt: skip
    return {
        "call": shapes | {"ring": found.ranks, "dtype": _dtype(found), "layout": _layout(found)} | found.call.said,
        **{name: getattr(found, name) for name in named},
        "tiles": tiles(found, full),
        "tiles_of_ranks": found.of_ranks,
        "tiles_of_slowest": found.slowest,
    }


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
    holds = f"each rank holds {queries} queries and {keys} keys" + (", with padding" if padded else "")
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


def tiles(found: CallAnalysis, full: bool = False) -> Rows:
    """The tiles of each hop: those of each rank if there are few or with `full`, else their extremes.

    Consecutive hops with equal extremes are one row.
    """
    counts = found.tiles.tolist()
    if found.ranks <= COLUMNS or full:

        def row(hop: Any, keys: str, tiles: Sequence[int], busiest: int) -> dict[str, Any]:
            of_ranks = {f"rank {number}": count for number, count in enumerate(tiles)}
            return {"hop": hop, "keys of": keys, **of_ranks, "busiest": busiest}

        hops = zip(found.hops, counts, strict=True)
        rows = [row(hop.number, rank(-hop.offset), tiles, max(tiles)) for hop, tiles in hops]
        return [*rows, row("sum", "", found.of_ranks, found.slowest)]

    def extremes(hops: Any, tiles: Sequence[int], busiest: int) -> dict[str, Any]:
        mean = f"{sum(tiles) / len(tiles):.1f}"
        return {"hop": hops, "least busy rank": min(tiles), "mean": mean, "busiest rank": busiest}

    runs = groupby(zip(found.hops, counts, strict=True), lambda pair: extremes("", pair[1], max(pair[1])))
    rows = [shown | {"hop": _runs(sorted({hop.number for hop, _ in run}))} for shown, run in runs]
    return [*rows, extremes("all", found.of_ranks, found.slowest)]


def _of_tiles(found: CallAnalysis) -> Iterator[str]:
    yield balance(found)
    if any(hop.ways == 2 for hop in found.hops):
        yield "After hop 0 each row is half of the heads: their keys come from either side."
    if found.skipped:
        lost = f"no query sees the keys that are {_runs(found.skipped)} ranks away."
        yield f"{len(found.hops) - 1} of {found.ranks - 1} sends are made: {lost}"


def balance(found: CallAnalysis) -> str:
    """A sentence: how many tiles are computed, and how evenly the ranks share them."""
    work, total = sum(found.of_ranks), found.grid * found.ranks * found.ranks
    computed = f"{_share(work, total)} of all {total} tiles are computed."
    if found.ranks == 1:
        return computed
    busy = _share(work, found.slowest * found.ranks)
    return f"{computed} Each hop waits for its busiest rank: counted in tiles, ranks are busy {busy} of the time."


def totals(found: CallAnalysis) -> str:
    """A sentence: how many bytes each rank sends."""
    if not found.sent:
        return "Nothing is sent."
    forward, backward = (
        sum(row["times"] * row["bytes"] for row in found.sent if row["pass"] == phase)
        for phase in ("forward", "backward")
    )
    return f"Each rank sends {amount(forward)} in the forward pass and {amount(backward)} in the backward pass."


def _of_sends(found: CallAnalysis) -> Iterator[str]:
    yield totals(found)
    if found.gathered:
        yield f"Before the first hop each rank gathers {amount(found.gathered)} of ids and positions."


def _of_memory(found: CallAnalysis) -> str:
    counted = "Each array is counted once, without the workspace of the kernel and without what XLA copies or shares."
    if found.compiled is None:
        return f"{counted} --compile asks XLA for its own figure."
    named = {"forward": found.compiled["forward"], "forward and backward": found.compiled["both"]}
    said = [f"{amount(count)} {name}" for name, count in named.items() if count is not None]
    planned = f"Temporary memory as XLA plans it on {found.compiled['devices']}"
    return f"{counted} {planned}: {', '.join(said) or 'no figure'}."


def _share(part: float, whole: float) -> str:
    return "-" if whole == 0 else f"{100 * part / whole:.0f}%"


def _runs(numbers: Sequence[int]) -> str:
    """Sorted integers as short text, such as `2 to 6, 9`."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
