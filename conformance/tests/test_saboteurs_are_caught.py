# SPDX-License-Identifier: Apache-2.0
"""The suite passes correct kernels, and each known fault fails the tests that are named for it."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from ringattn_conformance import tiers
from ringattn_conformance.plugin import COUNT_FLAG
from ringattn_testing.conformance import saboteurs
from ringattn_testing.conformance.reference_kernels import Dense, Tiled
from ringattn_testing.conformance.saboteurs import REFERENCES, SABOTEURS

HERE = Path(__file__).parent
VERDICT = re.compile(r"^VERDICT (\w+) \S*?::(.+)$", re.MULTILINE)
OF_TILES = re.compile(r"-(range|mask|causal|window|segments|bias)")
"""Tests of calls in which a query does not see every key: those in which a kernel may skip tiles."""
BACKENDS = (*SABOTEURS, *REFERENCES)


def _tests_of(backend: str) -> list[str]:
    """What must be run on a saboteur, or on a reference: all that its broken kin are judged by."""
    if backend in SABOTEURS:
        return [test.format(backend) for test in (*SABOTEURS[backend].caught_by, SABOTEURS[backend].passes)]
    tiled = isinstance(REFERENCES[backend], Tiled)
    kind = Dense if tiled else type(REFERENCES[backend])
    kin = [s for s in SABOTEURS.values() if isinstance(s.kernel, kind)]
    tests = dict.fromkeys(test.format(backend) for s in kin for test in (*s.caught_by, s.passes))
    return [test for test in tests if not tiled or OF_TILES.search(test)]


@cache
def verdicts() -> dict[str, str]:
    """The verdict on every test of every backend. One process runs them: starting JAX takes longer than a test."""
    tests = [test for backend in BACKENDS for test in _tests_of(backend)]
    command = [sys.executable, "-m", "pytest", "-p", saboteurs.__name__, "-s", "-q", "--tb=line", "-c", os.devnull]
    command += [argument for backend in BACKENDS for argument in ("--ringattn-backend", backend)]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "--rootdir", str(HERE), "--pyargs"]
    command += [f"ringattn_conformance.suite.{test}" for test in tests]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # The saboteurs import JAX before any plugin could ask for devices.
    flags = [flag for flag in environment.get("XLA_FLAGS", "").split() if not flag.startswith(COUNT_FLAG)]
    environment["XLA_FLAGS"] = " ".join([*flags, f"{COUNT_FLAG}={tiers.RINGS[-1]}"])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE)
    found = {name: outcome for outcome, name in VERDICT.findall(done.stdout)}
    missing = {_name(test) for test in tests} - found.keys()
    assert not missing, f"{missing} did not run\n{done.stdout[-4000:]}{done.stderr}"
    return found


def _name(test: str) -> str:
    return test.partition("::")[2]


@pytest.mark.parametrize("saboteur", SABOTEURS)
def test_a_broken_backend_fails_the_tests_that_are_named_for_it_and_no_other(saboteur: str):
    sabotage = SABOTEURS[saboteur]
    *caught_by, passes = _tests_of(saboteur)
    for test in caught_by:
        assert verdicts()[_name(test)] == "failed", f"{sabotage.kernel.fault} It went past {test}"
    assert verdicts()[_name(passes)] == "passed"


@pytest.mark.parametrize("reference", REFERENCES)
def test_a_correct_backend_passes_every_test_that_its_broken_kin_fail(reference: str):
    failed = [test for test in _tests_of(reference) if verdicts()[_name(test)] != "passed"]
    assert not failed, failed
