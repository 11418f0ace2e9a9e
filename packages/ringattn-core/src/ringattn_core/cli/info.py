# SPDX-License-Identifier: Apache-2.0
"""`ringattn info NAME`: all that one backend says of itself."""

import argparse
import json
import sys
from typing import Any

from . import table
from .screen import Screen


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "info",
        help="all about one backend: features, probe, kernel",
        description="Shows what one backend says of itself: its distribution, platforms, kernel and probe, whether it "
        "can run here, and how far it answers each feature. Exits with 1 where it cannot run here.",
    )
    parser.add_argument("name", metavar="NAME", help="the name that `ringattn list` shows")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..backends import discovery
    from ..backends.doctor import backend_of
    from ..contract.features import Feature
    from ..errors import BackendNotFoundError

    registered = discovery.registrations()
    if arguments.name not in registered:
        raise BackendNotFoundError(arguments.name, tuple(registered))
    backend = backend_of(registered[arguments.name], load=True)
    if arguments.json:
        print(json.dumps(backend.to_dict(), indent=2))
        return int(backend.reason is not None)
    screen = Screen.of(sys.stdout)
    facts = [
        ("name", backend.name),
        ("distribution", f"{backend.distribution} {backend.version}"),
        ("platforms", ", ".join(backend.platforms) or "-"),
        ("priority", "-" if backend.priority is None else str(backend.priority)),
        ("backend API", "-" if backend.api is None else str(backend.api)),
        (backend.door or "kernel", backend.implementation or "-"),
        ("probe", backend.probe or "none: it runs wherever JAX does"),
        ("here", backend.reason or "available"),
    ]
    print("\n".join(table.lines(facts[0], facts[1:], width=screen.width)))
    rows = [(name, word, Feature[name].value) for name, word in backend.features.items()]
    if rows:
        print()
        print("\n".join(table.lines(("feature", "support", "what it is"), rows, width=screen.width)))
    return int(backend.reason is not None)
