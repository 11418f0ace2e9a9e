# SPDX-License-Identifier: Apache-2.0
"""The command `ringattn-conformance`: runs the suite against one backend and exits with the verdict."""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest

from . import run_options
from .collection import SUITE
from .results import Results, has_failed, write

CERTIFIED: Final = 0
FAILED: Final = 1
UNUSABLE: Final = 2
NOT_CERTIFIED: Final = 3
CODES: Final = f"""exit codes:
  {CERTIFIED}  the certificate is given
  {FAILED}  a test failed, or an expected failure passed or does not exist
  {UNUSABLE}  nothing ran: an argument, the backend or its pyproject.toml cannot be used
  {NOT_CERTIFIED}  nothing failed, but no certificate is given: the last line says why
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command and returns an exit code of `CODES`; for wrong arguments raises SystemExit(2)."""
    parser, line = _parser(), list(sys.argv[1:] if arguments is None else arguments)
    end = line.index("--") if "--" in line else len(line)
    try:
        return run(parser.parse_args(line[:end]), line[end + 1 :])
    except OSError as error:
        parser.exit(UNUSABLE, f"{parser.prog}: {error}\n")


def run(given: argparse.Namespace, more: Sequence[str]) -> int:
    """Runs the suite against one backend; ignores the pytest settings of the current folder."""
    if given.workers != "0":
        # OpenBLAS, by which NumPy multiplies matrices, would start a thread for each core in every worker.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "report.json")
        line = ["--pyargs", f"{__package__}.suite", "-c", os.devnull, "--rootdir", str(SUITE.parent)]
        line += ["-p", "no:cacheprovider", "--tb=short", "-n", str(given.workers), run_options.BACKEND, given.backend]
        # pytest warns that it cannot rewrite the assertions of this package, which is imported already.
        line += ["-rN", "-W", "ignore::pytest.PytestAssertRewriteWarning"]
        asked = {name: getattr(given, name) for name in run_options.OPTIONS}
        line += run_options.in_pytest(asked | {"report": written})
        code = pytest.main([*line, *more])
        if not written.is_file():
            return UNUSABLE if code else NOT_CERTIFIED
        found = json.loads(written.read_text())
    if given.report:
        write(given.report, found)
    return exit_code(found)


def exit_code(found: Results) -> int:
    """The exit code for the results of a run: certified, failed, or not certified."""
    backends = found["backends"].values()
    if any(map(has_failed, backends)):
        return FAILED
    given = [one["certificate"]["given"] for one in backends]
    return CERTIFIED if given and all(given) else NOT_CERTIFIED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("ringattn-conformance", description="Certify ring-attention backends.")
    commands = parser.add_subparsers(required=True, metavar="run")
    raw = argparse.RawDescriptionHelpFormatter
    one = commands.add_parser("run", help="run the suite against one backend", epilog=CODES, formatter_class=raw)
    one.description = "Run the suite against one backend, and judge it. What follows -- goes to pytest."
    one.add_argument("backend", metavar="NAME", help="the name under which it is registered")
    workers = "worker processes, spread over the devices, or 'auto' (default: none)"
    one.add_argument("-n", dest="workers", default="0", metavar="N", help=workers)
    for name, how in run_options.OPTIONS.items():
        one.add_argument(f"--{name}", dest=name, **how)
    return parser


if __name__ == "__main__":
    sys.exit(main())
