# SPDX-License-Identifier: Apache-2.0
"""The command `ringattn`: its subcommands, its exit statuses, and errors printed as one line."""

import argparse
import importlib
import logging
import os
import re
import sys
from collections.abc import Sequence
from typing import Final, NoReturn

import importlib_metadata

COMMANDS: Final = {
    "list": "every installed backend, and why it cannot run here where it cannot",
    "info": "one backend: its features, probe and kernel",
    "doctor": "what works here, and how to repair what does not",
    "explain": "what a call would do: backend, hops, tiles, bytes, memory, times",
    "tune": "time a backend's candidate configurations for a call, and store the fastest",
    "cache": "list or remove the stored tuning results",
}
_MODULES: Final = {"list": "doctor", "info": "doctor", "cache": "tune"}
"""The module of each subcommand that has no module named after it.

The module of subcommand NAME has a function `add_NAME(parser)`, which adds the arguments of the subcommand and sets
`run`, the function that carries the subcommand out.
"""
REFUSED: Final = 2
"""The exit status after an error. `argparse` exits with the same status."""
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
"""The exit status that shells give a program that writes into a closed pipe."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Prints `message` as one line, without the usage text, and exits with `REFUSED`."""
        self.exit(REFUSED, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line `arguments`, by default `sys.argv[1:]`; returns the exit status for the process."""
    given = parsed(sys.argv[1:] if arguments is None else arguments)
    from ringattn_core.errors import RingAttnError  # imports JAX: help and misspelled commands must not wait for it

    from .output import one_line

    # Commands print what the library would log, so the log stays silent unless the user has set it up.
    logging.getLogger("ringattn").addHandler(logging.NullHandler())
    try:
        status = given.run(given)
        sys.stdout.flush()
    except RingAttnError as error:
        print(f"ringattn {given.command}: {one_line(error)}", file=sys.stderr)
        return REFUSED
    except BrokenPipeError:
        # Python flushes the rest of its buffer at exit, which would raise again: discard it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def parsed(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses a command line. In the result, `run` is the function that carries out the subcommand.

    Imports only the module of the subcommand that `arguments` names, because the modules of subcommands import JAX.
    """
    whole = _Parser(
        prog="ringattn",
        description="Shows which backends are installed and what a call would do, and tunes kernels for a call.",
        epilog="`ringattn COMMAND --help` describes each command. Errors exit with 2.",
    )
    versions = ", ".join(f"{name} {importlib_metadata.version(name)}" for name in ("ringattn-tools", "ringattn-core"))
    whole.add_argument("--version", action="version", version=versions)
    subparsers = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, summary in COMMANDS.items():
        parser = subparsers.add_parser(name, help=summary)
        if name in arguments[:1]:
            module = importlib.import_module(f".{_MODULES.get(name, name)}", __package__)
            getattr(module, f"add_{name}")(parser)
    # A value such as `-,5` begins like an option. With a space before it, argparse takes it as a value.
    return whole.parse_args([f" {word}" if re.match(r"-[\d,]", word) else word for word in arguments])
