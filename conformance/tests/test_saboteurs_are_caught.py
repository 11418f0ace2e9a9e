# SPDX-License-Identifier: Apache-2.0
"""The suite itself is sharp: it passes right kernels, and each known fault fails the tests that are named for it."""

import os
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from ringattn_conformance.plugin import COUNT_FLAG, DEVICES
from saboteurs import REFERENCES, SABOTEURS

HERE = Path(__file__).parent
VERDICT = re.compile(r"^VERDICT (\w+) \S*?::(.+)$", re.MULTILINE)
README = HERE.parent / "README.md"


@cache
def verdicts(backend: str, tests: tuple[str, ...]) -> dict[str, str]:
    """What the suite says of a backend, test by test, in a process of its own."""
    named = [f"ringattn_conformance.suite.{test.format(backend)}" for test in tests]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "saboteurs",
        "--ringattn-backend",
        backend,
        "-s",
        "-q",
        "--tb=line",
    ]
    command += [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        "-c",
        os.devnull,
        "--rootdir",
        str(HERE),
        "--pyargs",
        *named,
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE), environment.get("PYTHONPATH", "")])
    # The saboteurs import JAX before any plugin could ask for devices.
    environment["XLA_FLAGS"] = f"{COUNT_FLAG}={DEVICES}"
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=HERE)
    found = {name: outcome for outcome, name in VERDICT.findall(done.stdout)}
    assert len(found) == len(tests), done.stdout + done.stderr
    return found


def _name(test: str, backend: str) -> str:
    return test.format(backend).partition("::")[2]


@pytest.mark.parametrize("saboteur", SABOTEURS)
def test_a_broken_backend_fails_the_tests_that_are_named_for_it_and_no_other(saboteur: str):
    sabotage = SABOTEURS[saboteur]
    found = verdicts(saboteur, (*sabotage.caught_by, sabotage.passes))
    for test in sabotage.caught_by:
        assert found[_name(test, saboteur)] == "failed", f"{sabotage.fault} It went past {test}"
    assert found[_name(sabotage.passes, saboteur)] == "passed"


@pytest.mark.parametrize("reference", REFERENCES)
def test_a_right_backend_passes_every_test_that_its_broken_kin_fail(reference: str):
    made_of_it = [s for s in SABOTEURS.values() if isinstance(s.kernel, type(REFERENCES[reference]))]
    every = dict.fromkeys(test for sabotage in made_of_it for test in (*sabotage.caught_by, sabotage.passes))
    found = verdicts(reference, tuple(every))
    assert set(found.values()) == {"passed"}, [name for name, outcome in found.items() if outcome != "passed"]


def test_the_readme_lists_every_saboteur_and_the_tests_that_catch_it():
    table = README.read_text()
    for name, sabotage in SABOTEURS.items():
        assert row(name, sabotage.fault, sabotage.caught_by) in table, f"{name}: the row in README.md is out of date"


def row(name: str, fault: str, caught_by: tuple[str, ...]) -> str:
    """A line of the table in the README."""
    tests = ", ".join(f"`{test.replace('{}-', '').replace('[{}]', '')}`" for test in caught_by)
    return f"| `{name}` | {fault} | {tests} |"
