# SPDX-License-Identifier: Apache-2.0
"""The command `ringattn-conformance`: runs the suite, draws a badge from a report, compares two reports."""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import pytest
from ringattn_core.errors import in_one_line

from . import badge, comparison, run_options
from .collection import SUITE
from .schema import Report, read, write

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
OF_COMPARE: Final = """exit codes:
  0  nothing is worse in the second report
  1  a test fails that did not, or a feature or the certificate is lost
  2  a report cannot be read
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line; returns its exit code, which the help lists. Wrong arguments exit with 2."""
    parser, line = _parser(), list(sys.argv[1:] if arguments is None else arguments)
    end = line.index("--") if "--" in line else len(line)
    given = parser.parse_args(line[:end])
    given.pytest = line[end + 1 :]
    try:
        return given.command(given)
    except (ValueError, OSError) as error:
        parser.exit(UNUSABLE, f"{parser.prog}: {error}\n")
    except (LookupError, TypeError, AttributeError) as error:
        if given.command is run:
            raise
        parser.exit(UNUSABLE, f"{parser.prog}: a report is damaged ({in_one_line(error)}). Run the suite again\n")


def run(given: argparse.Namespace) -> int:
    """Runs the suite against one backend; ignores the pytest settings of the current folder."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder, "report.json")
        line = ["--pyargs", f"{__package__}.suite", "-c", os.devnull, "--rootdir", str(SUITE.parent)]
        line += ["-p", "no:cacheprovider", "--tb=short", "-n", str(given.workers), run_options.BACKEND, given.backend]
        # pytest warns that it cannot rewrite the assertions of this package, which is imported already.
        line += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        asked = {name: getattr(given, name) for name in run_options.OPTIONS}
        line += run_options.in_pytest(asked | {"report": written})
        code = pytest.main([*line, *given.pytest])
        if not written.is_file():
            return UNUSABLE if code else NOT_CERTIFIED
        report = read(written)
    if given.report:
        write(given.report, report)
    return exit_code(report)


def exit_code(report: Report) -> int:
    """The exit code of a run with this report."""
    backends = report["backends"].values()
    bad = any(one["failed"] or one["unexpected_passes"] or one["unknown_expectations"] for one in backends)
    if bad or report["crashes"]:
        return FAILED
    given = [one["certificate"]["given"] for one in backends]
    return CERTIFIED if given and all(given) else NOT_CERTIFIED


def draw(given: argparse.Namespace) -> int:
    report = read(given.report)
    names = list(report["backends"])
    name = given.backend or (names[0] if len(names) == 1 else None)
    if name not in names:
        told = "several backends" if given.backend is None else f"no backend {name!r}"
        raise ValueError(f"{given.report} has {told}: {', '.join(names) or 'it is empty'}. Name one with --backend")
    image = badge.svg(name, report["backends"][name], report)
    given.output.write_text(image, encoding="utf-8")
    return 0


def compare(given: argparse.Namespace) -> int:
    before, after = read(given.before), read(given.after)
    print("\n".join(comparison.lines(before, after)))
    worse = comparison.worse(before, after)
    print("\n" + "\n".join(["for the worse:", *(f"  {one}" for one in worse)] if worse else ["nothing is worse"]))
    return 1 if worse else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("ringattn-conformance", description="Certify ring-attention backends.")
    commands = parser.add_subparsers(required=True, metavar="run | badge | compare")
    raw = argparse.RawDescriptionHelpFormatter
    one = commands.add_parser("run", help="run the suite against one backend", epilog=CODES, formatter_class=raw)
    one.description = "Run the suite against one backend, and judge it. What follows -- goes to pytest."
    one.add_argument("backend", metavar="NAME", help="the name under which it is registered")
    workers = "worker processes, spread over the devices, or 'auto' (default: none)"
    one.add_argument("-n", dest="workers", default="0", metavar="N", help=workers)
    for name, how in run_options.OPTIONS.items():
        one.add_argument(f"--{name}", dest=name, **how)
    one.set_defaults(command=run)
    image = commands.add_parser("badge", help="draw a report as an SVG badge")
    image.add_argument("report", type=Path, metavar="REPORT.json")
    image.add_argument("-o", dest="output", type=Path, required=True, metavar="BADGE.svg")
    image.add_argument("--backend", metavar="NAME", help="which one, where the report has several")
    image.set_defaults(command=draw)
    two = commands.add_parser(
        "compare", help="what changed between two reports", epilog=OF_COMPARE, formatter_class=raw
    )
    two.add_argument("before", type=Path, metavar="BEFORE.json")
    two.add_argument("after", type=Path, metavar="AFTER.json")
    two.set_defaults(command=compare)
    return parser


if __name__ == "__main__":
    sys.exit(main())
