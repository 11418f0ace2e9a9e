# SPDX-License-Identifier: Apache-2.0
"""`ringattn explain --layers`: which layout and which strategies suit a model whose layers have different masks."""

import argparse
import json
from typing import Any, Final, NamedTuple

from ringattn_core.errors import InputError
from ringattn_core.placement.layout import LAYOUTS, pieces

from . import picture, plans
from .abstract_call import AbstractCall
from .analysis import analyse
from .cost import Cost
from .output import Bytes, Rows, Seconds, Title, show

_OPTIONS: Final = {"window": "sliding_window", "chunk": "chunk_size"}
_UNUSED: Final = ("strategy", "layout", "full", "compile", *picture.KINDS)
"""Arguments that the table does not read."""


class Kind(NamedTuple):
    """Layers of a model with the same mask, `times` of them. `options` are arguments of the command line by name."""

    times: int
    name: str
    options: dict[str, Any]


class Layer(NamedTuple):
    """One layer in one layout: its fastest strategy, or `None` without rates; the tiles of the busiest ranks of a ring.

    `sent` is what a rank sends in both passes, with the fastest strategy, or in a ring.
    """

    layout: str
    kind: Kind
    plan: Cost | None
    tiles: int
    sent: int


def parsed(text: str) -> tuple[Kind, ...]:
    """The kinds of layers in `text`, such as `5*window=1023,1*global`; a type for `argparse`."""
    kinds = []
    for part in text.split(","):
        count, _, name = part.strip().rpartition("*")
        option, _, value = name.partition("=")
        counted = not count or (count.isdecimal() and int(count))
        if not counted or not (name == "global" or (option in _OPTIONS and value.isdecimal())):
            wanted = "COUNT*global, COUNT*window=W or COUNT*chunk=C, with a COUNT of at least 1"
            raise argparse.ArgumentTypeError(f"got {part!r}, it needs {wanted}")
        given = (int(value), 0) if option == "window" else int(value or 0)
        kinds.append(Kind(int(count or 1), name, {_OPTIONS[option]: given} if value else {}))
    return tuple(kinds)


def run(arguments: argparse.Namespace) -> int:
    """Prints the table of all layouts. Raises for masks of layers in two places, and for arguments in `_UNUSED`."""
    for name in _OPTIONS.values():
        if getattr(arguments, name) is not None:
            raise InputError("--layers", f"is given with {name}", "Say in --layers which layers have it")
    for name in _UNUSED:
        if getattr(arguments, name) not in (None, False, "contiguous"):  # their defaults
            remedy = f"Leave --{name} out: --layers compares all layouts and strategies, and prints nothing else"
            raise InputError("--layers", f"is given with --{name}", remedy)
    named = [layout for layout in LAYOUTS if arguments.query[1] % (arguments.ring * pieces(layout)) == 0]
    layers = {layout: [_layer(arguments, layout, kind) for kind in arguments.layers] for layout in named}
    if not layers:
        fact = f"{arguments.query[1]} tokens cannot be split over {arguments.ring} ranks"
        raise InputError("--query", fact, "Pass a length that the ring divides")
    best = min(layers, key=lambda layout: _cost(layers[layout]))
    rows = [row for layout in named for row in _rows(layers[layout], layout == best)]
    if arguments.json:
        print(json.dumps({"layers": rows, "layout": best}, indent=2))
    else:
        title = " and ".join(f"{kind.times} * {kind.name}" for kind in arguments.layers)
        show(Title(f"{title}: one layout for all layers"), rows, _told(layers[best], arguments.device))
    return 0


def _layer(arguments: argparse.Namespace, layout: str, kind: Kind) -> Layer:
    """The layer in this layout, analysed and reckoned as `ringattn explain` does for one call."""
    given = argparse.Namespace(**{**vars(arguments), **kind.options, "layout": layout})
    found = analyse(AbstractCall.of(given), plans.platform_of(given), given.backend, given.tile)
    reckoned = plans.reckoning(found, given)
    plan = None if isinstance(reckoned, str) else reckoned.fastest
    of_ring = sum(row["times"] * row["bytes"] for row in found.sent)
    return Layer(layout, kind, plan, found.tiles_of_slowest, of_ring if plan is None else plan.sent)


def _cost(layers: list[Layer]) -> float:
    """The seconds of all layers, or, without rates, the tiles of the busiest ranks."""
    return sum(x.kind.times * (x.tiles if x.plan is None else x.plan.seconds) for x in layers)


def _rows(layers: list[Layer], best: bool) -> Rows:
    """A row for each kind of layers in a layout, and their sum. `best` marks the layout."""

    def row(name: str, strategy: str | None, of: list[Layer]) -> dict[str, Any]:
        times = [(x.kind.times, x.plan) for x in of if x.plan is not None]
        return {
            "chosen": best,
            "layout": of[0].layout,
            "layers": name,
            "strategy": strategy,
            "tiles of a ring": sum(x.kind.times * x.tiles for x in of),
            "both passes": Seconds(sum(number * plan.seconds for number, plan in times)) if times else None,
            "waits": Seconds(sum(number * plan.waits for number, plan in times)) if times else None,
            "sent": Bytes(sum(x.kind.times * x.sent for x in of)),
        }

    each = [row(f"{x.kind.times} * {x.kind.name}", x.plan.name if x.plan else "ring", [x]) for x in layers]
    return [*each, row("sum", None, layers)]


def _told(layers: list[Layer], device: str | None) -> str:
    """Says why this layout is the best for the layers, and with which strategies."""
    layout, strategies = layers[0].layout, ", ".join(f"{x.plan.name} for {x.kind.name}" for x in layers if x.plan)
    if strategies:
        return f"Reckoned, not measured: the model is fastest in {layout!r} order, with {strategies}."
    remedy = "--rate and --link" if device else "--device, or --rate and --link"
    return f"Without rates, only tiles of a ring are compared, and {layout!r} has the fewest: for times, pass {remedy}."
