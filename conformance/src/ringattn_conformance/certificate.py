# SPDX-License-Identifier: Apache-2.0
"""Whether a backend is certified: every test of the tier ran, and nothing in the run made it easier."""

from typing import Any, Final

from .schema import BackendReport, Certificate, Report
from .tiers import RINGS

_COMPLETE: Final = (0, 1)
"""The exit statuses of pytest runs that were completed."""


def judged(backend: BackendReport, report: Report) -> Certificate:
    """Decides on the certificate. Expected failures with a reason do not prevent it; they are listed with it."""
    spoiled = [
        _counted(backend["failed"], "failed"),
        _counted(report["crashes"], "ended the process that ran it", "ended the processes that ran them"),
        _counted(backend["unexpected_passes"], "passed and is expected to fail", "passed and are expected to fail"),
        _counted(
            backend["unknown_expectations"], "is expected to fail and unknown", "are expected to fail and unknown"
        ),
        _counted(backend["deselected"], "was deselected", "were deselected"),
        _counted(backend["skipped"], "was skipped", "were skipped"),
        _counted(backend["not_run"], "did not run"),
        "declared, not tried: " + ", ".join(untried) if (untried := backend.get("untried")) else None,
        *(f"{module} was not collected" for module in report["uncollected"]),
        *_eased(report["options"]),
    ]
    if report["exit_status"] not in _COMPLETE:
        spoiled.append(f"pytest ended with exit status {report['exit_status']}")
    reasons = [reason for reason in spoiled if reason]
    return {"given": not reasons, "tier": report["options"]["tier"], "spoiled_by": reasons}


def _eased(options: Any) -> list[str]:
    factor, largest = options["tolerance_factor"], options["largest_ring"]
    found = [f"every tolerance was multiplied by {factor:g}"] if factor > 1 else []
    return found + ([f"no case was tried on a ring of more than {largest} by turns"] if largest < RINGS[-1] else [])


def _counted(tests: list[str], one: str, many: str = "") -> str | None:
    if not tests:
        return None
    return f"1 test {one}" if len(tests) == 1 else f"{len(tests)} tests {many or one}"
