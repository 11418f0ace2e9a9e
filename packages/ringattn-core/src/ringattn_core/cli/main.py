# SPDX-License-Identifier: Apache-2.0
"""Which subcommands `ringattn` has, and the exit status and the one line that an error becomes."""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

import importlib_metadata

from ..errors import RingAttnError
from . import backends, cache, explain, tune

COMMANDS: Final = (backends.add_list, backends.add_info, backends.add_doctor, explain.add, tune.add, cache.add)
REFUSED: Final = 2
"""The exit status of a wrong command line, as `argparse` has it."""
INTERRUPTED: Final = 130
BROKEN_PIPE: Final = 141
"""What a shell reports of a program that wrote into a closed pipe."""


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
        # Python flushes the rest of the buffer at exit: send it nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    whole = argparse.ArgumentParser(
        prog="ringattn",
        description="Shows which backends are installed and what a call would do, and tunes kernels for a call.",
        epilog="`ringattn COMMAND --help` describes each command. Errors exit with 2.",
    )
    whole.add_argument(
        "--version", action="version", version=f"ringattn-core {importlib_metadata.version('ringattn-core')}"
    )
    subparsers = whole.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(subparsers)
    return whole
