# SPDX-License-Identifier: Apache-2.0
"""What an explanation says in words and tables."""

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from . import table, terminal
from .explanation import Compiled, Explanation, Message
from .screen import Screen
from .table import amount, share


def report(found: Explanation, screen: Screen) -> Iterator[str]:
    """The lines of the whole explanation."""
    yield screen.bold(title(found))
    yield from _prose(described(found), screen)
    yield ""
    yield from _backends(found, screen)
    yield ""
    yield from _tiles(found, screen)
    yield ""
    yield from _sent(found, screen)
    yield ""
    yield from _memory(found, screen)


def _prose(sentences: str, screen: Screen) -> Iterator[str]:
    yield from textwrap.wrap(sentences, screen.width, break_on_hyphens=False)


def title(found: Explanation) -> str:
    """The call in a line."""
    given = found.request
    query, key = ("x".join(map(str, shape)) for shape in (given.query, given.key[1:]))
    value = "" if given.value[3] == given.key[3] else f", values of {given.value[3]}"
    ring = "one device" if given.ring == 1 else f"a ring of {given.ring}"
    return f"query {query}, key {key}{value}, {given.dtype}: {ring}, {given.layout}"


def described(found: Explanation) -> str:
    """The masks and options of the call."""
    given = found.request
    queries, keys = found.lengths
    masks = {
        "causal": "causal" if given.causal else None,
        "prefix": given.prefix and f"causal but for the first {given.prefix}",
        "mask": given.mask_builder and f"mask of {given.mask_builder}",
        "window": given.sliding_window
        and "window {}, {}".format(*("-" if n is None else n for n in given.sliding_window)),
        "chunk": given.chunk_size and f"chunks of {given.chunk_size}",
        "documents": given.documents and f"{len(given.documents)} document" + "s" * (len(given.documents) > 1),
        "positions": "positions restart" if given.documents and given.restart_positions else None,
        "sinks": given.sinks and f"sinks of {given.sinks}",
        "bias": given.bias and f"bias {'x'.join(map(str, given.bias))}",
        "alibi": "ALiBi" if given.alibi else None,
        "dropout": given.dropout_prob and f"dropout {given.dropout_prob}",
        "ways": "both ways round" if given.two_way else None,
        "cap": given.logits_soft_cap and f"soft cap {given.logits_soft_cap}",
    }
    said = ", ".join(str(word) for word in masks.values() if word) or "no mask"
    padded = (queries * given.ring, keys * given.ring) != (given.query[1], given.key[1])
    return f"{said}; each rank holds {queries} queries and {keys} keys" + (", padding among them" if padded else "")


def _backends(found: Explanation, screen: Screen) -> Iterator[str]:
    yield screen.bold(f"Backends on {found.platform}")
    rows = []
    for candidate in found.candidates:
        runs = "runs this call" + ("" if candidate.gradients else ", without gradients")
        mark = "->" if candidate.name == found.choice else ""
        owner = f"{candidate.distribution} {candidate.version}"
        priority = "-" if candidate.priority is None else str(candidate.priority)
        rows.append((mark, candidate.name, owner, priority, candidate.reason or runs))
    head = ("", "name", "distribution", "priority", "answer")
    yield from table.lines(head, rows, right="   r", width=screen.width)
    if found.refusal:
        yield from table.lines(("none:", found.refusal), (), width=screen.width)
    if found.own_ring:
        yield from _prose(f"{found.choice} drives a ring of its own; below is what core's engine would do.", screen)


def _tiles(found: Explanation, screen: Screen) -> Iterator[str]:
    rows, columns = found.states.shape[2:]
    size = "{} queries by {} keys".format(*found.tile)
    yield screen.bold(f"Tiles that each rank computes at each hop ({rows} x {columns} tiles of {size} a hop)")
    yield "A kernel has tiles of its own size; choose the one shown with --tile."
    yield from terminal.picture(found, screen)
    yield ""
    yield from _counts(found, screen)
    yield from _prose(balance(found), screen)
    if any(hop.ways == 2 for hop in found.hops):
        yield from _prose("After hop 0 each column is of half of the heads: their keys come from either side.", screen)
    if found.skipped:
        made, all_hops = len(found.hops) - 1, found.ranks - 1
        lost = f"no query sees the keys that are {_runs(found.skipped)} ranks away."
        yield from _prose(f"{made} of {all_hops} sends are made: {lost}", screen)


def balance(found: Explanation) -> str:
    """How much work there is, and how evenly the ranks share it."""
    work, total = sum(found.of_ranks), found.grid * found.ranks * found.ranks
    computed = f"{share(work, total)} of all {total} tiles are computed."
    if found.ranks == 1:
        return computed
    busy = share(work, found.slowest * found.ranks)
    return f"{computed} Each hop waits for its busiest rank: counted in tiles, ranks are busy {busy} of the time."


def totals(found: Explanation) -> str:
    """All that each rank sends."""
    if not found.forward:
        return "Nothing is sent."
    forward, backward = (sum(m.bytes for m in messages) for messages in (found.forward, found.backward))
    return f"Each rank sends {amount(forward)} in the forward pass and {amount(backward)} in the backward pass."


def _counts(found: Explanation, screen: Screen) -> Iterator[str]:
    """A row a rank and a column a hop, where that fits; else a row a hop."""
    head = ["tiles", *(f"hop {hop.number}" for hop in found.hops), "sum"]
    rows = [["keys of", *(rank(-hop.offset) for hop in found.hops), ""]]
    for number, total in enumerate(found.of_ranks):
        rows.append([f"rank {number}", *(str(hop.tiles[number]) for hop in found.hops), str(total)])
    rows.append(["busiest", *(str(max(hop.tiles)) for hop in found.hops), str(found.slowest)])
    lines = list(table.lines(head, rows, right=" " + "r" * (len(head) - 1), width=screen.width))
    if max(map(len, lines)) <= screen.width:
        yield from lines
        return
    spread = [(str(min(x)), f"{sum(x) / len(x):.1f}", str(max(x))) for x in (hop.tiles for hop in found.hops)]
    numbers = [hop.number for hop in found.hops]
    rows = [(_runs(sorted({*numbers[first : last + 1]})), *counts) for first, last, counts in _alike(spread)]
    rows.append(("all", str(min(found.of_ranks)), f"{sum(found.of_ranks) / found.ranks:.1f}", str(found.slowest)))
    yield from table.lines(("hop", "least busy rank", "mean", "busiest rank"), rows, right="rrrr")


def _sent(found: Explanation, screen: Screen) -> Iterator[str]:
    yield screen.bold("Sent by each rank")
    rows = [
        (phase, str(times), contents(message), f"to rank {rank(message.shift)}", amount(message.bytes))
        for phase, messages in (("forward", found.forward), ("backward", found.backward))
        for message, times in Counter(messages).items()
    ]
    if rows:
        yield from table.lines(("", "times", "what", "where", "bytes each"), rows, right=" r  r", width=screen.width)
    yield from _prose(totals(found), screen)
    if found.gathered:
        yield from _prose(
            f"Before the first hop each rank gathers {amount(found.gathered)} of ids and positions.", screen
        )


def rank(distance: int) -> str:
    """The rank so far onward from rank `r`."""
    return f"r {'+' if distance > 0 else '-'} {abs(distance)}" if distance else "r"


def contents(message: Message) -> str:
    return {(True, False): "K,V", (False, True): "dk,dv", (True, True): "K,V with dk,dv"}[
        message.keys, message.gradients
    ]


def _alike(items: Sequence[Any]) -> Iterator[tuple[int, int, Any]]:
    """Equal items in a row, once, with the numbers of the first and of the last."""
    first = 0
    for number, item in enumerate(items):
        if number + 1 == len(items) or items[number + 1] != item:
            yield first, number, item
            first = number + 1


def _memory(found: Explanation, screen: Screen) -> Iterator[str]:
    yield screen.bold("Memory of one device")
    rows = [(entry.phase, entry.what, amount(entry.bytes)) for entry in found.memory]
    for phase in ("forward", "backward"):
        total = sum(entry.bytes for entry in found.memory if entry.phase == phase)
        rows.append((phase, "together: the engine at its busiest hop", amount(total)))
    order = ("call", "forward", "backward")
    yield from table.lines(("", "arrays", "bytes"), sorted(rows, key=lambda row: order.index(row[0])), right="  r")
    counted = "Each array once; the workspace of the kernel, and what XLA copies or lets share, is not in it."
    yield from _prose(f"{counted} {_of_xla(found.compiled)}", screen)


def _of_xla(compiled: Compiled | None) -> str:
    if compiled is None:
        return "--compile asks XLA for its own figure."
    named = (("forward", compiled.forward), ("forward and backward", compiled.both))
    said = [f"{amount(count)} {what}" for what, count in named if count is not None]
    return f"Temporary memory as XLA plans it on {compiled.devices}: {', '.join(said) or 'it does not say'}."


def _runs(numbers: Sequence[int]) -> str:
    """`2 to 6, 9`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
