# SPDX-License-Identifier: Apache-2.0
"""`ringattn list`, `info` and `doctor`: which backends are installed, and whether they work here."""

import argparse
import json
import logging
from collections.abc import Callable
from typing import Any

from .output import TextTable, Title, show


def add_list(subparsers: Any) -> None:
    _add(subparsers, "list", run_list, "every installed backend, and why it cannot run here where it cannot")


def add_info(subparsers: Any) -> None:
    parser = _add(subparsers, "info", run_info, "one backend: its features, probe and kernel")
    parser.add_argument("name", metavar="NAME", help="the name that `ringattn list` shows")


def add_doctor(subparsers: Any) -> None:
    _add(subparsers, "doctor", run_doctor, "what works here, and how to repair what does not")


def _add(subparsers: Any, name: str, run: Callable[..., int], summary: str) -> argparse.ArgumentParser:
    """Adds a command whose description is the docstring of `run`."""
    parser = subparsers.add_parser(name, help=summary, description=run.__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def run_list(arguments: argparse.Namespace) -> int:
    """Lists every registered backend: its name, distribution and version, the platforms that it serves, its priority,
    how many features it supports, and whether it can run here. Loads no kernel.
    """
    from ..backends.doctor import backends
    from ..contract.features import Feature
    from ..errors import BackendNotFoundError

    found = backends()
    if arguments.json:
        print(json.dumps([backend.to_dict() for backend in found], indent=2))
        return 0
    if not found:
        raise BackendNotFoundError(None, ())
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
    reasons = [(f"{backend.name}:", backend.reason) for backend in found if backend.reason is not None]
    show(TextTable(("name", "distribution", "platforms", "priority", "features", "here"), rows, right="   r"))
    if reasons:
        show("", TextTable((), reasons))
    return 0


def run_info(arguments: argparse.Namespace) -> int:
    """Shows what one backend declares: its distribution, platforms, kernel and probe, whether it can run here, and its
    support of each feature. Exits with 1 where it cannot run here.
    """
    from ..backends import discovery
    from ..backends.doctor import backend_of
    from ..contract.features import Feature
    from ..errors import BackendNotFoundError

    registered = discovery.registrations()
    if arguments.name not in registered:
        raise BackendNotFoundError(arguments.name, tuple(registered))
    backend = backend_of(registered[arguments.name], load=True)
    status = int(backend.reason is not None)
    if arguments.json:
        print(json.dumps(backend.to_dict(), indent=2))
        return status
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
    rows = [(name, word, Feature[name].value) for name, word in backend.features.items()]
    show(TextTable((), facts))
    if rows:
        show("", TextTable(("feature", "support", "what it is"), rows))
    return status


def run_doctor(arguments: argparse.Namespace) -> int:
    """Checks versions, devices, the environment and every backend, and says how to repair each fault. Initialises JAX.
    Exits with 1 where no backend works.
    """
    from ..backends.doctor import diagnose

    # `diagnose` lists what the library would log as warnings.
    logging.getLogger("ringattn").addHandler(logging.NullHandler())
    found = diagnose()
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
        return int(not found.healthy)
    idle = "has no device to run on" if found.platform is None else f"is not for {found.platform}"
    states = []
    for backend in found.backends:
        works = "works, and is the default" if backend.name == found.default else "works"
        states.append((backend.name, works if backend.name in found.working else backend.reason or idle))
    sections = {
        "versions": found.versions.items(),
        "devices": [(found.platform or "none", ", ".join(found.devices))],
        "environment": found.environment.items() or [("nothing set", "")],
        "backends": states or [("none", "")],
        "faults" if found.faults else "no faults": [("-", fault) for fault in found.faults],
    }
    for title, rows in sections.items():
        # The empty first column indents the others.
        show(Title(title), *([TextTable((), [("", *row) for row in rows])] if rows else []))
    return int(not found.healthy)
