# SPDX-License-Identifier: Apache-2.0
"""Which subcommands there are, and what becomes of their errors: one line, and the exit status."""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import Final

from ..errors import RingAttnError
from . import cache, doctor, explain, info, listing, tune

COMMANDS: Final = (listing, info, doctor, explain, tune, cache)
REFUSED: Final = 2
"""The exit status of a command line that asks for what there is not; `argparse` has the same."""
INTERRUPTED: Final = 130
CLOSED: Final = 141
"""What a shell reports of a program whose reader went away."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line, by default that of the process; returns the exit status."""
    given = parser().parse_args(arguments)
    try:
        status = given.run(given)
        sys.stdout.flush()
    except RingAttnError as error:
        print(f"ringattn {given.command}: {error.one_line()}", file=sys.stderr)
        return REFUSED
    except BrokenPipeError:
        # What is left in the buffer must not be tried again when the interpreter ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return CLOSED
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    whole = argparse.ArgumentParser(
        prog="ringattn",
        description="Looks at what is installed, at what a call would do, and for how it runs fastest.",
        epilog="`ringattn COMMAND --help` says more of each. Errors exit with 2.",
    )
    whole.add_argument("--version", action="version", version=f"ringattn-core {metadata.version('ringattn-core')}")
    subparsers = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(subparsers)
    return whole
