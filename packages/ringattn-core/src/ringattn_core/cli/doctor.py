# SPDX-License-Identifier: Apache-2.0
"""`ringattn doctor`: versions, devices, environment and backends, and what to do about what does not work."""

import argparse
import json
import logging
import sys
from typing import Any

from . import table
from .screen import Screen


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="what works here, and what to do about what does not",
        description="Looks at versions, devices, the environment and every backend, and says what to do about each "
        "fault. Initialises JAX. Exits with 1 where no backend works.",
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..backends.doctor import diagnose

    # What the library would warn of is among the faults.
    logging.getLogger("ringattn").addHandler(logging.NullHandler())
    found = diagnose()
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
        return int(not found.healthy)
    screen = Screen.of(sys.stdout)
    states = []
    for backend in found.backends:
        if backend.name in found.working:
            states.append((backend.name, "works" + (", and is the default" if backend.name == found.default else "")))
        else:
            states.append((backend.name, backend.reason or _idle(found.platform)))
    sections = {
        "versions": list(found.versions.items()),
        "devices": [(found.platform or "none", ", ".join(found.devices))],
        "environment": list(found.environment.items()) or [("nothing set", "")],
        "backends": states or [("none", "")],
    }
    for title, rows in sections.items():
        print(screen.bold(title))
        for line in table.lines(rows[0], rows[1:], width=screen.width - 2):
            print(f"  {line}")
    print(screen.bold("faults") if found.faults else screen.bold("no faults"))
    for fault in found.faults:
        print("\n".join(table.lines(("  -", fault), (), width=screen.width)))
    return int(not found.healthy)


def _idle(platform: str | None) -> str:
    return "has no device to run on" if platform is None else f"is not for {platform}"
