# SPDX-License-Identifier: Apache-2.0
"""`ringattn cache`: what is kept of tuning, and where; removes it on request."""

import argparse
import json
from typing import Any


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "cache",
        help="show or clear the configurations that tuning has kept",
        description="Lists every configuration that tuning has kept for this user, the newest last.",
    )
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--clear", action="store_true", help="remove all of them")
    asked.add_argument("--json", action="store_true", help="everything that is kept of each, as JSON")
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
        kept = [
            {"path": str(e.path), "problem": e.problem, "config": e.config.to_dict(), "trials": e.trials}
            for e in entries
        ]
        print(json.dumps(kept, indent=2))
        return 0
    print(f"{len(entries)} in {root}")
    for entry in entries:
        print(f"\n{entry.path.name}")
        for line in _lines(entry):
            print(f"  {line}")
    return 0


def _lines(entry: Any) -> list[str]:
    """The problem without what it has not, then the choice, in a few lines."""
    from ..tuning.tuner import shown

    problem = {name: value for name, value in entry.problem.items() if value not in (None, False, [], ())}
    versions = ", ".join(" ".join(pair) for pair in problem.pop("versions"))
    told = ", ".join(f"{name} {value}" if value is not True else name for name, value in problem.items())
    return [
        told,
        versions,
        f"forward: {shown(entry.config.fwd_params)}",
        f"backward: {shown(entry.config.bwd_params)}",
    ]
