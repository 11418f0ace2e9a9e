# SPDX-License-Identifier: Apache-2.0
"""The report of a run of the suite: features, rings, outcomes, the worst errors, and the certificate."""

import dataclasses
import datetime
from collections import Counter
from collections.abc import Mapping
from typing import Any, cast, get_args

from . import certificate, coverage, environment, notes
from .collection import Collection, Name
from .schema import FORMAT, UNDECLARED, BackendReport, Error, FeatureReport, Nearest, Options, Outcome, Report


@dataclasses.dataclass
class Ran:
    """One finished test."""

    name: Name
    outcome: Outcome
    notes: Mapping[str, Any]


@dataclasses.dataclass
class Run:
    """The finished tests by node id, and the tests during which a worker process died."""

    tests: dict[str, Ran] = dataclasses.field(default_factory=dict)
    crashes: list[str] = dataclasses.field(default_factory=list)

    def add(self, node: str, name: Name, outcome: Outcome, found: Mapping[str, Any]) -> None:
        """Records the outcome of one phase of a test. A failure is not overwritten by a later phase."""
        before = self.tests.get(node)
        if before is None or before.outcome != "failed":
            self.tests[node] = Ran(name, outcome, found or (before.notes if before else {}))

    def of(self, backend: str) -> list[Ran]:
        return [ran for ran in self.tests.values() if ran.name.concerns(backend)]


def document(
    run: Run,
    collection: Collection,
    expected: Mapping[str, Mapping[str, str]],
    options: Options,
    exit_status: int,
) -> Report:
    """The whole report as plain data; `expected` has an entry for each backend of the run."""
    import jax

    devices = jax.devices()
    report: Report = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": environment.versions(),
        "environment": environment.variables(),
        "devices": {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)},
        "options": options,
        "uncollected": collection.uncollected,
        "crashes": sorted(run.crashes),
        "exit_status": exit_status,
        "backends": {},
    }
    for name, reasons in expected.items():
        found = _backend(name, run, collection, reasons)
        found["certificate"] = certificate.judged(found, report)
        report["backends"][name] = found
    return report


def _backend(name: str, run: Run, collection: Collection, reasons: Mapping[str, str]) -> BackendReport:
    from ringattn_core.backends import discovery
    from ringattn_core.contract.features import Feature

    registration = discovery.registrations()[name]
    descriptor = registration.descriptor()
    tests = run.of(name)
    passes = coverage.compared((ran.outcome, ran.notes) for ran in tests)
    declared = [feature.name for feature in Feature if descriptor.supports(feature)]

    def with_outcome(outcome: Outcome) -> list[str]:
        return sorted(ran.name.test for ran in tests if ran.outcome == outcome)

    return {
        "distribution": registration.distribution,
        "version": registration.version,
        "requires": environment.required_by(registration.distribution),
        "api": descriptor.api,
        "half_partials": descriptor.half_partials,
        "kind": "ring function" if descriptor.kernel is None else "block kernel",
        "certificate": {"given": False, "tier": "", "spoiled_by": []},
        "outcomes": _counted(tests),
        "failed": with_outcome("failed"),
        "skipped": with_outcome("skipped"),
        "expected_failures": {test: reasons.get(test, "") for test in with_outcome("expected_failure")},
        "unexpected_passes": with_outcome("unexpected_pass"),
        "unknown_expectations": collection.unknown(reasons),
        "deselected": collection.left_out(name),
        "not_run": collection.not_run(name, run.tests),
        "rings": _rings(tests),
        "features": {
            feature.name: _feature(feature.name, descriptor.supports(feature), tests, passes) for feature in Feature
        },
        "untried": coverage.untried(declared, passes),
        "uncovered": coverage.uncovered(declared, passes),
        "worst": _worst(tests),
    }


def _counted(tests: list[Ran]) -> dict[str, int]:
    """The number of tests by outcome; outcomes that did not occur are left out."""
    counts = Counter(ran.outcome for ran in tests)
    return {outcome: counts[outcome] for outcome in get_args(Outcome) if counts[outcome]}


def _rings(tests: list[Ran]) -> dict[str, dict[str, int]]:
    """The number of tests by the size of the ring: on real devices, and emulated on one."""
    counts = Counter((ranks, how) for ran in tests for ranks, how in ran.notes.get("rings", ()))
    sizes = sorted({ranks for ranks, _ in counts})
    return {str(ranks): {how: counts[ranks, how] for how in ("real", "emulated")} for ranks in sizes}


def _feature(feature: str, support: bool, tests: list[Ran], passes: Any) -> FeatureReport:
    needing = [ran for ran in tests if feature in ran.notes.get("needed", ())]
    return {
        "support": "FULL" if support else UNDECLARED,
        "outcomes": _counted(needing),
        "refusals": sum(feature in ran.notes.get("refused", ()) for ran in tests),
        "worst": next(reversed(_errors(needing)), None),
        "tried": coverage.tried(feature, passes),
    }


def _errors(tests: list[Ran]) -> list[Nearest]:
    """The errors of all results, sorted by error over tolerance: the largest is the last."""
    found = [
        cast(Nearest, {"dtype": dtype, "result": result, "test": ran.name.test, **error})
        for ran in tests
        for dtype, results in ran.notes.get("worst", {}).items()
        for result, error in results.items()
    ]
    return sorted(found, key=notes.share)


def _worst(tests: list[Ran]) -> dict[str, dict[str, Error]]:
    """For each dtype and result, of all errors, the one that is the largest part of its tolerance."""
    worst: dict[str, dict[str, Error]] = {}
    for one in _errors(tests):
        found: Error = {"error": one["error"], "tolerance": one["tolerance"], "test": one["test"]}
        worst.setdefault(one["dtype"], {})[one["result"]] = found
    return worst
