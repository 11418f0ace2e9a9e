# SPDX-License-Identifier: Apache-2.0
"""`ringattn list`: every backend that is registered, and whether it can run here."""

import argparse
import json
import sys
from typing import Any

from . import table
from .screen import Screen


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "list",
        help="every installed backend, and why not where it cannot run",
        description="Lists every registered backend: its name, distribution and version, the platforms that it serves, "
        "its priority, how many features it supports, and whether it can run here or why not. Loads no kernel.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON, with the support of every feature")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..backends.doctor import backends
    from ..contract.features import Feature

    found = backends()
    if arguments.json:
        print(json.dumps([backend.to_dict() for backend in found], indent=2))
        return 0
    if not found:
        from ..errors import BackendNotFoundError

        raise BackendNotFoundError(None, ())
    screen = Screen.of(sys.stdout)
    rows = [
        (
            backend.name,
            f"{backend.distribution} {backend.version}",
            ", ".join(backend.platforms) or "-",
            "-" if backend.priority is None else str(backend.priority),
            f"{backend.supported} of {len(Feature)}",
            "available" if backend.reason is None else "no",
        )
        for backend in found
    ]
    head = ("name", "distribution", "platforms", "priority", "features", "here")
    print("\n".join(table.lines(head, rows, right="   r", width=screen.width)))
    reasons = [(f"{backend.name}:", backend.reason) for backend in found if backend.reason is not None]
    if reasons:
        print()
        print("\n".join(table.lines(reasons[0], reasons[1:], width=screen.width)))
    return 0
