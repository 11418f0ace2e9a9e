# SPDX-License-Identifier: Apache-2.0
"""Whether a backend is certified: every test of the tier ran, and nothing in the run made it easier."""

from typing import Any, Final

from .schema import BackendReport, Certificate, Report
from .tiers import RINGS

SPOILING: Final = {
    "failed": "failed",
    "unexpected_passes": "passed unexpectedly",
    "unknown_expectations": "expected to fail and not in the suite",
    "deselected": "deselected",
    "skipped": "skipped",
    "not_run": "selected and not run",
}
"""The lists of a backend's tests that spoil the certificate, and what those tests did."""
CRASHED: Final = "crashed the process"
_COMPLETE: Final = (0, 1)
"""The exit statuses of pytest runs that were completed."""


def judged(backend: BackendReport, report: Report) -> Certificate:
    """Decides on the certificate. Expected failures with a reason do not prevent it; they are listed with it."""
    options, untried = report["options"], backend.get("untried")
    lists: Any = {what: backend[key] for key, what in SPOILING.items()} | {CRASHED: report["crashes"]}
    reasons = [f"{len(tests)} test{'s' * (len(tests) > 1)} {what}" for what, tests in lists.items() if tests]
    reasons += ["declared, not tried: " + ", ".join(untried)] if untried else []
    reasons += [f"{module} was not collected" for module in report["uncollected"]]
    if (factor := options["tolerance_factor"]) > 1:
        reasons.append(f"every tolerance was multiplied by {factor:g}")
    if (largest := options["largest_ring"]) < RINGS[-1]:
        reasons.append(f"no case was tried on a ring of more than {largest} by turns")
    if report["exit_status"] not in _COMPLETE:
        reasons.append(f"pytest ended with exit status {report['exit_status']}")
    return {"given": not reasons, "tier": options["tier"], "spoiled_by": reasons}
