# SPDX-License-Identifier: Apache-2.0
"""`ringattn cache`: lists the configurations that tuning has stored, or removes them."""

import argparse
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..tuning.cache import Entry


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "cache",
        help="list or remove the stored tuning results",
        description="Lists every configuration that tuning has stored for this user, the newest last.",
    )
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--clear", action="store_true", help="remove all of them")
    asked.add_argument("--json", action="store_true", help="print everything that is stored, as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..tuning import cache

    root = cache.directory()
    if root is None:
        print("there is no cache directory for this user")
        return 1
    if arguments.clear:
        try:
            removed = cache.clear()
        except OSError as error:
            print(f"cannot clear {root}: {error}")
            return 1
        print(f"removed {removed} from {root}")
        return 0
    entries = cache.entries()
    if arguments.json:
        print(json.dumps([entry.to_dict() for entry in entries], indent=2))
        return 0
    print(f"{len(entries)} in {root}", *map(_text, entries), sep="\n\n")
    return 0


def _text(entry: "Entry") -> str:
    """An entry as text: its file, its problem, and the chosen parameters."""
    from ..tuning.tuner import shown

    problem = dict(entry.problem)
    versions = ", ".join(" ".join(pair) for pair in problem.pop("versions"))
    told = ", ".join(f"{name} {value}" if value is not True else name for name, value in problem.items())
    forward, backward = shown(entry.config.fwd_params), shown(entry.config.bwd_params)
    return f"{entry.path.name}\n  {told}\n  {versions}\n  forward: {forward}\n  backward: {backward}"
