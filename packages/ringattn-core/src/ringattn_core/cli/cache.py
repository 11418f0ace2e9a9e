# SPDX-License-Identifier: Apache-2.0
"""`ringattn cache`: lists the configurations that tuning has stored, or removes them."""

import argparse
import json

from ..tuning import cache
from ..tuning.tuner import shown


def add_cache(parser: argparse.ArgumentParser) -> None:
    parser.description = "Lists every configuration that tuning has stored for this user, the newest last."
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--clear", action="store_true", help="remove all of them")
    asked.add_argument("--json", action="store_true", help="print everything that is stored, as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    root = cache.directory()
    if root is None:
        print("there is no cache directory for this user")
        return 1
    if arguments.clear:
        try:
            print(f"removed {cache.clear()} from {root}")
        except OSError as error:
            print(f"cannot clear {root}: {error}")
            return 1
        return 0
    entries = cache.entries()
    if arguments.json:
        print(json.dumps([entry.to_dict() for entry in entries], indent=2))
    else:
        print(f"{len(entries)} in {root}", *map(_text, entries), sep="\n\n")
    return 0


def _text(entry: cache.Entry) -> str:
    """An entry as text: its file, its problem, and the chosen parameters."""
    problem = dict(entry.problem)
    versions = ", ".join(" ".join(pair) for pair in problem.pop("versions"))
    told = ", ".join(f"{name} {value}" if value is not True else name for name, value in problem.items())
    forward, backward = shown(entry.config.fwd_params), shown(entry.config.bwd_params)
    return f"{entry.path.name}\n  {told}\n  {versions}\n  forward: {forward}\n  backward: {backward}"
