# SPDX-License-Identifier: Apache-2.0
"""The results of a run as plain data, whether they earn the certificate, and the lines that report both."""

import datetime
import json
import os
import platform
import re
from collections.abc import Collection, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from .tiers import RINGS

FORMAT: Final = 4
"""The version of the results file: raised if a field is removed or changes its meaning, not if one is added."""
SPOILING: Final = {
    "failed": "failed",
    "unexpected_pass": "passed unexpectedly",
    "unknown": "expected to fail and not in the suite",
    "skipped": "skipped",
    "not_run": "not run",
    "crashed": "crashed the process",
}
"""Per outcome that prevents the certificate even for one test: the words that reports use for it."""
FAILING: Final = ("failed", "unexpected_pass", "unknown", "crashed")
"""The outcomes in `SPOILING` that make the command exit with 1 (failed), not 3 (not certified)."""
FEW: Final = 3
"""How many names a verdict prints for one reason; it counts the rest."""
LISTED: Final = 20
"""How many test ids of one list a run prints; the results file has all."""
_COMPLETE: Final = (0, 1)
"""The exit statuses with which pytest ends a complete run: all tests passed, or some failed."""
_REPORTED: Final = ("jax", "jaxlib", "numpy", "ml-dtypes", "pytest", "pytest-xdist")
_VARIABLES: Final = re.compile(r"RINGATTN_|JAX_|XLA_FLAGS$|XLA_PYTHON_CLIENT_PREALLOCATE$")
_NAME: Final = re.compile(r"[\w.-]+")

Results = dict[str, Any]
"""Plain data, as JSON holds it."""


def of_run(options: Mapping[str, Any], backends: Mapping[str, Results], exit_status: int) -> Results:
    """The content of the results file, with a certificate decided for each backend's results of `of_backend`."""
    import jax
    from ringattn_core.placement.platforms import platform_of

    seen = jax.devices()
    required = {name for one in backends.values() for name in _required(one["distribution"])}
    found = {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": versions(required),
        "environment": variables(),
        "devices": {"platform": platform_of(None, ()), "kind": seen[0].device_kind, "count": len(seen)},
        "options": dict(options),
        "exit_status": exit_status,
    }
    for one in backends.values():
        one["certificate"] = judged(one, found)
    return found | {"backends": dict(backends)}


def of_backend(name: str, tests: Mapping[str, str], lists: Mapping[str, Collection[str]], reasons: Any) -> Results:
    """The results of one backend. `tests` gives an outcome by test id, `lists` further test ids."""
    from ringattn_core.backends import discovery
    from ringattn_core.contract.features import Feature

    registration = discovery.registrations()[name]
    descriptor = registration.descriptor()
    declared = [feature.name for feature in Feature if descriptor.supports(feature)]
    outcomes = ("passed", "expected_failure", "failed", "unexpected_pass", "skipped")
    ids = {outcome: sorted(test for test, one in tests.items() if one == outcome) for outcome in outcomes}
    return {
        "distribution": registration.distribution,
        "version": registration.version,
        "api": descriptor.api,
        "kind": "ring function" if descriptor.kernel is None else "block kernel",
        "half_partials": descriptor.half_partials,
        "largest_head": descriptor.largest_head,
        "head_multiple": descriptor.head_multiple,
        "platforms": list(descriptor.platforms),
        "declared": declared,
        **ids,
        "passed": len(ids["passed"]),
        "expected_failure": {test: reasons.get(test, "") for test in ids["expected_failure"]},
        **{what: sorted(tests) for what, tests in lists.items()},
    }


def has_failed(backend: Results) -> bool:
    return any(backend[what] for what in FAILING)


def judged(backend: Results, run: Results) -> Results:
    """Decides on one backend's certificate: given or not, and why not. Expected failures do not prevent it."""
    options, platform = run["options"], run["devices"]["platform"]
    found = [(len(backend[key]), what) for key, what in SPOILING.items() if backend[key]]
    reasons = [f"{count} test{'s' * (count > 1)} {what}" for count, what in found]
    untried = [] if has_failed(backend) else backend["untried"]  # most have a test that failed, or that did not run
    for what, names in {"declared, not tried": untried, "not collected": backend["uncollected"]}.items():
        first, others = names[:FEW], len(names) - FEW
        reasons += [f"{what}: " + ", ".join(first) + (f" and {others} more" if others > 0 else "")] if first else []
    if (factor := options["tolerance_factor"]) > 1:
        reasons.append(f"every tolerance was multiplied by {factor:g}")
    if run["exit_status"] not in _COMPLETE:
        reasons.append(f"pytest ended with exit status {run['exit_status']}")
    passed, here = not reasons, {platform, "gpu" if platform == "cuda" else platform} & {*backend["platforms"]}
    if not here:
        reasons.append(f"it ran on {platform}, and declares {', '.join(backend['platforms'])}")
    return {"given": not reasons, "passed": passed, "tier": options["tier"], "spoiled_by": reasons}


def lines(backend: Results, run: Results) -> list[str]:
    """The lines that the end of a run prints about one backend, before the verdict.

    Where tests failed, it does not list what did not run because of them.
    """
    devices, found = run["devices"]["count"], []
    if devices < RINGS[-1]:
        found.append(f"rings of more than {devices} ranks were emulated by one device")
    failed = has_failed(backend)
    for key, what in SPOILING.items():
        found += [] if failed and key == "not_run" else _listed(what, backend[key])
    found += [] if failed else _listed("declared, not tried", backend["untried"])
    found += _listed("expected to fail", [f"{test}: {why}" for test, why in backend["expected_failure"].items()])
    return found


def verdict(name: str, run: Results) -> str:
    """The line that says whether a backend's certificate is given, and if not, why."""
    backend, of, options, jax = run["backends"][name], run["devices"], run["options"], run["versions"]["jax"]
    where = f"{of['count']} {of['kind']} with JAX {jax}, {run['date'][:10]}, seed {options['seed']}"
    return f"{name} {backend['version']} on {where}: {_judgement(backend)}"


def _judgement(backend: Results) -> str:
    certificate, expected = backend["certificate"], len(backend["expected_failure"])
    tier, why = f"the {certificate['tier']} tier", "; ".join(certificate["spoiled_by"])
    failures = f"{expected} expected failure{'s' * (expected > 1)}"
    if certificate["given"]:
        return ", with ".join([f"CERTIFIED for {tier}", *_limits(backend), *([failures] if expected else [])])
    if certificate["passed"]:
        tests = f"{backend['passed']} tests with {failures}" if expected else f"all {backend['passed']} tests"
        return f"PASSED {tier}, {tests}, without a certificate: {why}"
    though = "" if has_failed(backend) else f", though {backend['passed']} tests passed and none failed"
    return f"NOT CERTIFIED for {tier}{though}: {why}"


def _limits(backend: Results) -> list[str]:
    """The limits of the descriptor in words: the certificate holds within them."""
    largest, multiple = backend["largest_head"], backend["head_multiple"]
    found = ["partial results in half precision"] if backend["half_partials"] else []
    found += [f"heads of at most {largest}"] if largest is not None else []
    return found + ([f"head sizes that {multiple} divides"] if multiple > 1 else [])


def _listed(what: str, tests: Collection[str]) -> list[str]:
    more = [f"  and {len(tests) - LISTED} more"] if len(tests) > LISTED else []
    return [f"{what}:", *(f"  {test}" for test in list(tests)[:LISTED]), *more] if tests else []


def write(path: Path, found: Results) -> None:
    """Writes the results as JSON; a full disk or an interrupt leaves no half of a file at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    part.replace(path)


def versions(more: Iterable[str] = ()) -> dict[str, str | None]:
    """Versions of Python, the suite's dependencies, all `ringattn-*` distributions and `more`; None: not installed."""
    installed = {one.name.lower().replace("_", "-"): one.version for one in metadata.distributions()}
    family = [name for name in installed if name.startswith("ringattn-")]
    names = dict.fromkeys([*_REPORTED, *sorted({*family, *more})])
    return {"python": platform.python_version()} | {name: installed.get(name) for name in names}


def variables() -> dict[str, str]:
    """The environment variables that can change results."""
    return {name: x for name, x in sorted(os.environ.items()) if _VARIABLES.match(name)}


def _required(distribution: str) -> list[str]:
    """The names of the distributions that a distribution requires, extras left out."""
    try:
        requirements = metadata.requires(distribution) or ()
    except metadata.PackageNotFoundError:
        return []
    return [match[0] for line in requirements if "extra ==" not in line and (match := _NAME.match(line))]
