# SPDX-License-Identifier: Apache-2.0
"""Turns a `CallAnalysis` into the tables and sentences that `ringattn explain` prints as text or as JSON."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final

from . import documents
from .analysis import CallAnalysis
from .output import Bytes, Rows, Title, show

HIDDEN: Final = ("call", "keys_of", "states", "not_possible", "prefill", "work")
"""The fields of `CallAnalysis` that JSON leaves out, or shows under other names."""
COLUMNS: Final = 9
"""The most ranks for which the table of tiles has a column a rank. With more, it has minimum, mean and maximum."""

_MOST_PAIRS: Final = 2**28
"""The most tokens times ranks for which the busy share of each layout is counted: more would take minutes."""


def report(analysis: CallAnalysis, picture: str) -> None:
    """Prints the whole analysis, with `picture`, a drawing as text, above the table of tiles."""
    grid = "{} x {} tiles of {} queries by {} keys".format(*analysis.states.shape[2:], *analysis.tile)
    show(
        Title(title(analysis)), described(analysis), "",
        Title(f"Backends on {analysis.platform}"), analysis.backends, *_of_backend(analysis), "",
        Title(f"Tiles that each rank computes at each hop ({grid} a hop)"),
        "A kernel chooses its own tile size; --tile sets the size that is shown.", picture,
        tiles(analysis), *_of_tiles(analysis), *_of_documents(analysis), "",
        Title("Sent by each rank"), *([analysis.sent] if analysis.sent else []), totals(analysis), "",
        Title("Memory of one device"), analysis.memory, _of_memory(analysis), *_of_prefill(analysis),
    )  # fmt: skip


def as_json(analysis: CallAnalysis, full: bool = False) -> dict[str, Any]:
    """The analysis as plain data. With `full`, the table of tiles has a column for each rank, however many."""
    plain = {name: value for name, value in vars(analysis).items() if name not in HIDDEN}
    shapes = {name: x.shape for name, x in analysis.call.floating.items()}
    call = (
        shapes | {"ring": analysis.ranks, "dtype": _dtype(analysis), "layout": _layout(analysis)} | analysis.call.said
    )
    totals = {"tiles_of_ranks": analysis.tiles_of_ranks, "tiles_of_slowest": analysis.tiles_of_slowest}
    more = {"prefill": analysis.prefill, "busy": busy_layouts(analysis)}
    more = {name: table for name, table in more.items() if table}
    return {"call": call, **plain, "tiles": tiles(analysis, full), **totals, **more}


def title(analysis: CallAnalysis) -> str:
    """The call in one line: shapes, dtype, ring and layout."""
    query, key, value = (analysis.call.floating[name].shape for name in ("query", "key", "value"))
    shapes = f"query {'x'.join(map(str, query))}, key {'x'.join(map(str, key[1:]))}"
    values = "" if value[3] == key[3] else f", values of {value[3]}"
    ring = "one device" if analysis.ranks == 1 else f"a ring of {analysis.ranks}"
    return f"{shapes}{values}, {_dtype(analysis)}: {ring}, {_layout(analysis)}"


def _dtype(analysis: CallAnalysis) -> str:
    return analysis.call.floating["query"].dtype.name


def _layout(analysis: CallAnalysis) -> str:
    return analysis.call.options["layout"]


def described(analysis: CallAnalysis) -> str:
    """The options that differ from their defaults, and the number of tokens that each rank holds, as text."""
    queries, keys = analysis.lengths
    said = [f"{name.replace('_', ' ')} {_plain(value)}".rstrip() for name, value in analysis.call.said.items()]
    whole = tuple(analysis.call.floating[name].shape[1] for name in ("query", "key"))
    padded = (queries * analysis.ranks, keys * analysis.ranks) != whole
    holds = f"each rank holds {queries} queries and {keys} keys" + (", with padding" if padded else "")
    if padded and "SEGMENT_IDS" in analysis.needs and "documents" not in analysis.call.said:
        holds += " (which needs SEGMENT_IDS)"
    return f"{', '.join(said) or 'no mask'}; {holds}"


def _plain(value: Any) -> str:
    if value is True:
        return ""
    return ",".join("-" if x is None else str(x) for x in value) if isinstance(value, tuple) else str(value)


def _of_backend(analysis: CallAnalysis) -> Iterator[str]:
    if analysis.refusal:
        yield f"none: {analysis.refusal}"
    if analysis.own_ring:
        yield f"{analysis.choice} drives its own ring; below is what core's engine would do."
    if analysis.strategy != "ring":
        yield f"The call takes {analysis.strategy!r}; the tables of hops, sends and memory are those of 'ring'."


def tiles(analysis: CallAnalysis, full: bool = False) -> Rows:
    """A table of how many tiles each rank computes at each hop.

    With `full`, or with at most `COLUMNS` ranks, it has a row for each hop and a column for each rank. Else its columns
    are the least, the mean and the largest number of a rank, and consecutive hops with equal numbers share a row.
    """
    full = full or analysis.ranks <= COLUMNS

    def row(hop: Any, keys: str, counts: Sequence[int], busiest: int) -> dict[str, Any]:
        shown: dict[str, Any] = {"least": min(counts), "mean": f"{sum(counts) / len(counts):.1f}"}
        if full:
            shown = {f"rank {number}": count for number, count in enumerate(counts)}
        return {"hop": hop, "keys of": keys, **shown, "busiest": busiest}

    pairs = enumerate(zip(analysis.keys_of, analysis.tiles.tolist(), strict=True))
    rows = [row(number, keys, counts, max(counts)) for number, (keys, counts) in pairs]
    runs = [[one] for one in rows] if full else [list(run) for _, run in groupby(rows, lambda x: list(x.values())[2:])]
    for first, *_, last in (run for run in runs if len(run) > 1):
        first |= {name: f"{first[name]} to {last[name]}" for name in ("hop", "keys of")}
    return [*(run[0] for run in runs), row("sum", "", analysis.tiles_of_ranks, analysis.tiles_of_slowest)]


def _of_tiles(analysis: CallAnalysis) -> Iterator[str]:
    yield balance(analysis)
    if len(analysis.work.hops.sizes) > 1:
        inner, groups = analysis.work.hops.sizes
        yield (
            f"The ring has two levels: keys go round the {inner} ranks r of a group, and meanwhile the next keys come "
            f"from the group before, of {groups} groups g."
        )
    if analysis.skipped:
        runs = [[x for _, x in run] for _, run in groupby(enumerate(analysis.skipped), lambda pair: pair[1] - pair[0])]
        lost = ", ".join(f"{run[0]} to {run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
        made = f"{len(analysis.keys_of) - 1} of {analysis.ranks - 1} sends are made"
        yield f"{made}: no query sees the keys that are {lost} ranks away."


def balance(analysis: CallAnalysis) -> str:
    """Says what part of all tiles is computed, and how evenly the ranks share these tiles."""
    work, total = sum(analysis.tiles_of_ranks), analysis.states[:, 0].size * analysis.ranks
    computed = f"{100 * work / total:.0f}% of all {total} tiles are computed."
    if analysis.ranks == 1 or not work:
        return computed
    busy = f"{100 * work / (analysis.tiles_of_slowest * analysis.ranks):.0f}%"
    return f"{computed} Each hop waits for its busiest rank: counted in tiles, ranks are busy {busy} of the time."


def busy_layouts(analysis: CallAnalysis) -> dict[str, float]:
    """For each layout, the share of the time in which ranks compute, counted in pairs of a query and a visible key.

    Empty unless the call is causal, has documents and no other mask, and is short enough to count.
    """
    said, query = analysis.call.said, analysis.call.floating["query"]
    others = {"sliding_window", "chunk_size", "prefix", "mask_builder", "query_offset"} & said.keys()
    if others or not {"documents", "causal"} <= said.keys() or query.shape[1] * analysis.ranks > _MOST_PAIRS:
        return {}
    return documents.busy(said["documents"], query.shape[1], analysis.ranks)


def _of_documents(analysis: CallAnalysis) -> Iterator[str]:
    if shares := busy_layouts(analysis):
        listed = ", ".join(f"{layout} {100 * share:.0f}%" for layout, share in shares.items())
        yield f"Counted in pairs of a query and a key that it sees, ranks are busy: {listed}."


def totals(analysis: CallAnalysis) -> str:
    """Says how many bytes each rank sends in each pass, and gathers, as ids and positions, before the first hop."""
    if not analysis.sent:
        return "Nothing is sent."
    forward, backward = (
        Bytes(sum(row["times"] * row["bytes"] for row in analysis.sent if row["pass"] == phase))
        for phase in ("forward", "backward")
    )
    sent = f"Each rank sends {forward} in the forward pass and {backward} in the backward pass."
    ids = f"Before the first hop each rank gathers {Bytes(analysis.gathered)} of ids and positions."
    return f"{sent} {ids}" if analysis.gathered else sent


def _of_memory(analysis: CallAnalysis) -> str:
    counted = "Each array is counted once, without the workspace of the kernel and without what XLA copies or shares."
    if analysis.compiled is None:
        return f"{counted} --compile asks XLA for its own figure."
    named = {"forward": analysis.compiled["forward"], "forward and backward": analysis.compiled["both"]}
    said = [f"{Bytes(count)} {name}" for name, count in named.items() if count is not None]
    planned = f"Temporary memory as XLA plans it on {analysis.compiled['devices']}"
    return f"{counted} {planned}: {', '.join(said) or 'no figure'}."


def _of_prefill(analysis: CallAnalysis) -> Iterator[Any]:
    if analysis.prefill:
        (taken,) = (row["send"] for row in analysis.prefill if row["chosen"])
        yield ""
        yield Title("The same queries by prefill_attention: bytes that each rank sends")
        yield analysis.prefill
        yield f"By default it sends the {taken}, which is fewer bytes. Only send='keys' has gradients."
