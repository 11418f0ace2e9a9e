# SPDX-License-Identifier: Apache-2.0
"""`ringattn list`, `info` and `doctor`: which backends are installed, and whether they work here."""

import argparse
import json
from collections.abc import Callable

from ..backends import discovery
from ..backends.doctor import backend_of, backends, diagnose
from ..contract.features import Feature
from ..errors import BackendNotFoundError
from .output import Title, show


def add_list(parser: argparse.ArgumentParser) -> None:
    _add(parser, run_list)


def add_info(parser: argparse.ArgumentParser) -> None:
    _add(parser, run_info)
    parser.add_argument("name", metavar="NAME", help="the name that `ringattn list` shows")


def add_doctor(parser: argparse.ArgumentParser) -> None:
    _add(parser, run_doctor)


def _add(parser: argparse.ArgumentParser, run: Callable[..., int]) -> None:
    """Makes the docstring of `run` the description of the command."""
    parser.description = run.__doc__
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run_list(arguments: argparse.Namespace) -> int:
    """Lists every registered backend: its name, distribution and version, the platforms that it serves, its priority,
    how many features it supports, and whether it can run here. Loads no kernel.
    """
    found = backends()
    if arguments.json:
        print(json.dumps([backend.to_dict() for backend in found], indent=2))
        return 0
    if not found:
        raise BackendNotFoundError(None, ())
    rows = [
        {
            "name": backend.name,
            "distribution": f"{backend.distribution} {backend.version}",
            "platforms": backend.platforms,
            "priority": backend.priority,
            "features": f"{backend.supported} of {len(Feature)}",
            "here": "available" if backend.reason is None else "broken" if backend.broken else "no",
        }
        for backend in found
    ]
    reasons = {f"{backend.name}:": backend.reason for backend in found if backend.reason is not None}
    show(rows, *(["", reasons] if reasons else []))
    return 0


def run_info(arguments: argparse.Namespace) -> int:
    """Shows what one backend declares: its distribution, platforms, kernel and probe, whether it can run here, and its
    support of each feature. Loads its kernel. Exits with 1 where it cannot run here.
    """
    registered = discovery.registrations()
    if arguments.name not in registered:
        raise BackendNotFoundError(arguments.name, tuple(registered))
    backend = backend_of(registered[arguments.name], load=True)
    if arguments.json:
        print(json.dumps(backend.to_dict(), indent=2))
        return int(backend.reason is not None)
    shown = backend.to_dict()
    show({name: fact for name, fact in shown.items() if name != "features"})
    if backend.features:
        support = backend.features.items()
        show("", [{"feature": name, "support": word, "what it is": Feature[name].value} for name, word in support])
    return int(backend.reason is not None)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Checks versions, devices, the environment and every backend, and says how to repair each fault. Initialises JAX.
    Exits with 1 where no backend works, or where an installed one is broken.
    """
    found = diagnose()
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
        return int(not found.healthy)
    idle = "has no device to run on" if found.platform is None else f"is not for {found.platform}"
    states = {}
    for backend in found.backends:
        works = "works, and is the default" if backend.name == found.default else "works"
        states[backend.name] = works if backend.name in found.working else backend.reason or idle
    sections = {
        "versions": found.versions,
        "devices": {found.platform or "none": ", ".join(found.devices)},
        "environment": found.environment or {"nothing set": ""},
        "backends": states or {"none": ""},
    }
    for title, facts in sections.items():
        show(Title(title), {f"  {name}": fact for name, fact in facts.items()})
    show(Title("faults" if found.faults else "no faults"), *(f"- {fault}" for fault in found.faults))
    return int(not found.healthy)
