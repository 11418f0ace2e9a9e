# SPDX-License-Identifier: Apache-2.0
"""The text that `ringattn explain` prints of a call analysis."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from typing import Any

from .analysis import CallAnalysis, Message
from .memory import XlaMemory
from .output import TextTable, Title, amount, show

COLUMNS = 9
"""The most hops that are columns of the table of tiles; more are rows."""


def report(found: CallAnalysis, picture: Any) -> None:
    """Prints everything, with `picture` above the table of tiles."""
    rows, columns = found.states.shape[2:]
    show(Title(title(found)), described(found), "", *_backends(found))
    show(
        "",
        Title("Tiles that each rank computes at each hop ({} x {} tiles of {} queries by {} keys a hop)".format(
            rows, columns, *found.tile
        )),
        "A kernel chooses its own tile size; --tile sets the size that is shown.",
        picture,
        *_tiles(found),
        "",
        *_sent(found),
        "",
        *_memory(found),
    )  # fmt: skip


def title(found: CallAnalysis) -> str:
    """The shapes, the dtype, the ring and the layout."""
    call = found.request
    query, key = ("x".join(map(str, shape)) for shape in (call.query, call.key[1:]))
    value = "" if call.value[3] == call.key[3] else f", values of {call.value[3]}"
    ring = "one device" if call.ring == 1 else f"a ring of {call.ring}"
    return f"query {query}, key {key}{value}, {call.dtype}: {ring}, {call.layout}"


def described(found: CallAnalysis) -> str:
    """The masks and options that are not the default, and the tokens of a rank."""
    call, (queries, keys) = found.request, found.lengths
    options = [(field.name.replace("_", " "), getattr(call, field.name), field.default) for field in fields(call)[6:]]
    given = [
        name if value is True else f"{name} {_plain(value)}" for name, value, default in options if value != default
    ]
    padded = (queries * call.ring, keys * call.ring) != (call.query[1], call.key[1])
    holds = f"each rank holds {queries} queries and {keys} keys" + (", with padding" if padded else "")
    return f"{', '.join(given) or 'no mask'}; {holds}"


def _plain(value: Any) -> str:
    return ",".join("-" if x is None else str(x) for x in value) if isinstance(value, tuple) else str(value)


def _backends(found: CallAnalysis) -> Iterator[Any]:
    yield Title(f"Backends on {found.platform}")
    rows = [
        (
            "->" if each.name == found.choice else "",
            each.name,
            f"{each.distribution} {each.version}",
            "-" if each.priority is None else str(each.priority),
            each.reason or "runs this call" + ("" if each.gradients else ", without gradients"),
        )
        for each in found.candidates
    ]
    yield TextTable(("", "name", "distribution", "priority", "answer"), rows, right="   r")
    if found.refusal:
        yield f"none: {found.refusal}"
    if found.own_ring:
        yield f"{found.choice} drives its own ring; below is what core's engine would do."


def _tiles(found: CallAnalysis) -> Iterator[Any]:
    yield _counts_by_rank(found) if len(found.hops) <= COLUMNS else _counts_by_hop(found)
    yield balance(found)
    if any(hop.ways == 2 for hop in found.hops):
        yield "After hop 0 each column is half of the heads: their keys come from either side."
    if found.skipped:
        lost = f"no query sees the keys that are {_runs(found.skipped)} ranks away."
        yield f"{len(found.hops) - 1} of {found.ranks - 1} sends are made: {lost}"


def balance(found: CallAnalysis) -> str:
    """How many tiles are computed, and how evenly the ranks share them."""
    work, total = sum(found.of_ranks), found.grid * found.ranks * found.ranks
    computed = f"{_share(work, total)} of all {total} tiles are computed."
    if found.ranks == 1:
        return computed
    busy = _share(work, found.slowest * found.ranks)
    return f"{computed} Each hop waits for its busiest rank: counted in tiles, ranks are busy {busy} of the time."


def totals(found: CallAnalysis) -> str:
    """The bytes that each rank sends."""
    if not found.forward:
        return "Nothing is sent."
    forward, backward = (sum(m.bytes for m in messages) for messages in (found.forward, found.backward))
    return f"Each rank sends {amount(forward)} in the forward pass and {amount(backward)} in the backward pass."


def _counts_by_rank(found: CallAnalysis) -> TextTable:
    """A row for each rank, a column for each hop."""
    head = ["tiles", *(f"hop {hop.number}" for hop in found.hops), "sum"]
    rows = [["keys of", *(rank(-hop.offset) for hop in found.hops), ""]]
    for number, total in enumerate(found.of_ranks):
        rows.append([f"rank {number}", *(str(hop.tiles[number]) for hop in found.hops), str(total)])
    rows.append(["busiest", *(str(max(hop.tiles)) for hop in found.hops), str(found.slowest)])
    return TextTable(head, rows, right=" " + "r" * (len(head) - 1))


def _counts_by_hop(found: CallAnalysis) -> TextTable:
    """A row for each run of hops with equal counts."""

    def spread(hop: Any) -> tuple[str, ...]:
        return str(min(hop.tiles)), f"{sum(hop.tiles) / len(hop.tiles):.1f}", str(max(hop.tiles))

    rows = [(_runs(sorted({hop.number for hop in run})), *counts) for counts, run in groupby(found.hops, spread)]
    rows.append(("all", str(min(found.of_ranks)), f"{sum(found.of_ranks) / found.ranks:.1f}", str(found.slowest)))
    return TextTable(("hop", "least busy rank", "mean", "busiest rank"), rows, right="rrrr")


def _sent(found: CallAnalysis) -> Iterator[Any]:
    yield Title("Sent by each rank")
    rows = [
        (phase, str(times), contents(message), f"to rank {rank(message.shift)}", amount(message.bytes))
        for phase, messages in (("forward", found.forward), ("backward", found.backward))
        for message, times in Counter(messages).items()
    ]
    if rows:
        yield TextTable(("", "times", "what", "where", "bytes each"), rows, right=" r  r")
    yield totals(found)
    if found.gathered:
        yield f"Before the first hop each rank gathers {amount(found.gathered)} of ids and positions."


def rank(distance: int) -> str:
    """The rank that is `distance` onward from rank `r`."""
    return f"r {'+' if distance > 0 else '-'} {abs(distance)}" if distance else "r"


def contents(message: Message) -> str:
    return " with ".join(["K,V"] * message.keys + ["dk,dv"] * message.gradients)


def _memory(found: CallAnalysis) -> Iterator[Any]:
    yield Title("Memory of one device")
    rows = []
    for phase, held in groupby(found.memory, lambda entry: entry.phase):
        entries = list(held)
        rows += [(phase, entry.what, amount(entry.bytes)) for entry in entries]
        if phase != "call":
            total = sum(entry.bytes for entry in entries)
            rows.append((phase, "together: the engine at its busiest hop", amount(total)))
    yield TextTable(("", "arrays", "bytes"), rows, right="  r")
    counted = "Each array is counted once, without the workspace of the kernel and without what XLA copies or shares."
    yield f"{counted} {_of_xla(found.compiled)}"


def _of_xla(compiled: XlaMemory | None) -> str:
    if compiled is None:
        return "--compile asks XLA for its own figure."
    named = (("forward", compiled.forward), ("forward and backward", compiled.both))
    said = [f"{amount(count)} {what}" for what, count in named if count is not None]
    return f"Temporary memory as XLA plans it on {compiled.devices}: {', '.join(said) or 'no figure'}."


def _share(part: float, whole: float) -> str:
    return "-" if whole == 0 else f"{100 * part / whole:.0f}%"


def _runs(numbers: Sequence[int]) -> str:
    """Sorted integers in short: `2 to 6, 9`."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
