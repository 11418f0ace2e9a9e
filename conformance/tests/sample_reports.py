# SPDX-License-Identifier: Apache-2.0
"""A report as a run leaves it, for tests of what is made of reports."""

import copy
from typing import Any

from ringattn_conformance import certificate
from ringattn_conformance.schema import BackendReport, Report

BACKEND: BackendReport = {
    "distribution": "ringattn-acme",
    "version": "1.2.3",
    "requires": {"jax": "0.10.2"},
    "api": 1,
    "half_partials": False,
    "kind": "block kernel",
    "certificate": {"given": True, "tier": "core", "spoiled_by": []},
    "outcomes": {"passed": 188},
    "failed": [],
    "skipped": [],
    "expected_failures": {},
    "unexpected_passes": [],
    "unknown_expectations": [],
    "deselected": [],
    "not_run": [],
    "untried": [],
    "uncovered": [],
    "rings": {"2": {"real": 40, "emulated": 3}, "8": {"real": 0, "emulated": 20}},
    "features": {
        "CAUSAL": {
            "support": "FULL",
            "outcomes": {"passed": 38},
            "refusals": 0,
            "worst": {"dtype": "float16", "result": "out", "error": 4e-4, "tolerance": 2e-3, "test": "test_ring::a"},
        },
        "BIAS": {"support": "PLANNED", "outcomes": {}, "refusals": 3, "worst": None},
    },
    "worst": {"float16": {"out": {"error": 4e-4, "tolerance": 2e-3, "test": "test_ring::a"}}},
}
REPORT: Report = {
    "format": 2,
    "date": "2026-01-02T03:04:05+00:00",
    "versions": {"jax": "0.10.2", "ringattn-core": "0.1.0"},
    "environment": {"JAX_PLATFORMS": "cpu"},
    "devices": {"platform": "cpu", "kind": "cpu", "count": 8},
    "options": {"tier": "core", "largest_ring": 8, "tolerance_factor": 1.0},
    "uncollected": [],
    "crashes": [],
    "exit_status": 0,
    "backends": {"acme": BACKEND},
}


def report(name: str = "acme", **changes: Any) -> Report:
    """A report of one backend, judged anew; a change is of the whole, of its options or of the backend."""
    found: Any = copy.deepcopy(REPORT)
    backend = found["backends"].pop("acme")
    found["backends"][name] = backend
    for key, x in changes.items():
        holder = next(one for one in (found, found["options"], backend) if key in one)
        holder[key] = x
    backend["certificate"] = certificate.judged(backend, found)
    return found
