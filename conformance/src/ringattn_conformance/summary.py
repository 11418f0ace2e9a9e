# SPDX-License-Identifier: Apache-2.0
"""The text at the end of a run: a table of features, the tests left out, and the verdict on the certificate."""

from collections.abc import Iterable, Sequence
from typing import Any, Final

from rich import box
from rich.console import Console
from rich.table import Table

from . import notes
from .certificate import CRASHED, SPOILING
from .schema import BackendReport, FeatureReport, Report

LISTED: Final = 20
"""The most test ids of a list; the report has all of them."""
WIDTH: Final = 1000
"""Wide enough that no test id is wrapped."""
HEADINGS: Final = (
    "feature", "declared", "passed", "failed", "expected to fail", "refused", "compared", "nearest to its tolerance",
)  # fmt: skip
OUTCOMES: Final = {
    "passed": "passed",
    "failed": "failed",
    "expected_failure": "failed as expected",
    "unexpected_pass": "passed unexpectedly",
    "skipped": "skipped",
}


def title(name: str, backend: BackendReport, report: Report) -> str:
    return f"{name} of {backend['distribution']} {backend['version']}, {report['options']['tier']} tier"


def lines(backend: BackendReport, report: Report) -> list[str]:
    """The summary of one backend."""
    rows = [_row(feature, found) for feature, found in backend["features"].items()]
    found = [*table((HEADINGS, *rows)), "", "rings: " + (_rings(backend["rings"]) or "none")]
    if report["options"]["tolerance_factor"] != 1:
        found.append(f"EVERY TOLERANCE TIMES {report['options']['tolerance_factor']:g}")
    lists: Any = backend
    for key, what in SPOILING.items():
        found += listed(what, lists[key])
    found += listed("declared, not tried", backend.get("untried", ()))
    found += listed("pairs that no test compared", backend.get("uncovered", ()))
    found += listed("expected to fail", (f"{test}: {why}" for test, why in backend["expected_failures"].items()))
    found += listed(CRASHED, report["crashes"])
    found.append(", ".join(f"{n} {OUTCOMES[outcome]}" for outcome, n in backend["outcomes"].items()) or "nothing ran")
    return [*found, verdict(backend)]


def verdict(backend: BackendReport) -> str:
    """The last line: whether the certificate is given, and why not."""
    certificate, expected = backend["certificate"], len(backend["expected_failures"])
    if certificate["given"]:
        half = ", with partial results in half precision" if backend.get("half_partials") else ""
        but = half + (f", with {expected} expected failure{'s' * (expected > 1)}" if expected else "")
        return f"CERTIFIED for the {certificate['tier']} tier{but}"
    return f"NOT CERTIFIED for the {certificate['tier']} tier: {'; '.join(certificate['spoiled_by'])}"


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Formats `rows` as the lines of a table; the first row is its header."""
    head, *body = rows
    made = Table(*head, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for row in body:
        made.add_row(*row)
    console = Console(width=WIDTH, markup=False, highlight=False, emoji=False, no_color=True)
    with console.capture() as captured:
        console.print(made)
    return [line.rstrip() for line in captured.get().splitlines()]


def listed(what: str, tests: Iterable[str]) -> list[str]:
    """Names under a heading; no lines if there are none."""
    tests = list(tests)
    more = [f"  and {len(tests) - LISTED} more"] if len(tests) > LISTED else []
    return [f"{what}:", *(f"  {test}" for test in tests[:LISTED]), *more] if tests else []


def _row(feature: str, found: FeatureReport) -> tuple[str, ...]:
    outcomes, worst = found["outcomes"], found["worst"]
    failed = outcomes.get("failed", 0) + outcomes.get("unexpected_pass", 0)
    counts = (outcomes.get("passed", 0), failed, outcomes.get("expected_failure", 0), found["refusals"])
    near = f"{notes.share(worst):.1%} ({worst['result']}, {worst['dtype']})" if worst else ""
    tried = ", ".join(f"{dtype.lower()} {count}" for dtype, count in found.get("tried", {}).items())
    return (feature, found["support"].lower(), *(str(count or "") for count in counts), tried, near)


def _rings(rings: dict[str, dict[str, int]]) -> str:
    kinds = {ranks: " and ".join(how for how, count in found.items() if count) for ranks, found in rings.items()}
    return ", ".join(f"{ranks} {how}" for ranks, how in kinds.items())
