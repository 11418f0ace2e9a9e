# SPDX-License-Identifier: Apache-2.0
"""The tiers: the smallest one catches what the suite is there to catch."""

import re
from functools import cache
from pathlib import Path

import pytest
from ringattn_conformance import tiers
from ringattn_testing.conformance.saboteurs import SABOTEURS
from ringattn_testing.conformance.small_suites import started

NODE = re.compile(r"suite/(\w+)\.py::(.+)$", re.MULTILINE)


@cache
def collected(tier: str) -> frozenset[str]:
    """The tests of a tier, as pytest finds them."""
    command = ["-m", "pytest", "-q", "--co", "-p", "no:cacheprovider", "--pyargs", "ringattn_conformance.suite"]
    options = ["--ringattn-backend", "xla", "--ringattn-tier", tier]
    done = started(Path(__file__).parent, *command, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    return frozenset(f"{module}::{test}" for module, test in NODE.findall(done.stdout))


def test_the_core_tier_has_something_of_every_file():
    assert {test.partition("::")[0] for test in collected(tiers.CORE)} == {
        test.partition("::")[0] for test in collected(tiers.FULL)
    }


@pytest.mark.parametrize("saboteur", SABOTEURS)
def test_a_saboteur_is_caught_in_the_core_tier(saboteur: str):
    caught_by = {test.format("xla") for test in SABOTEURS[saboteur].caught_by}
    assert caught_by & collected(tiers.CORE), f"none of {caught_by} is in the core tier"


def test_a_mark_that_names_parameters_names_some_that_exist():
    """A parameter that is renamed would leave its tier in silence."""
    code = """
import importlib, sys
from ringattn_conformance import collection, tiers
for module in collection.modules():
    loaded = importlib.import_module(f"ringattn_conformance.suite.{module}")
    for name, function in vars(loaded).items():
        for mark in getattr(function, "pytestmark", ()) if name.startswith("test_") else ():
            if mark.name == tiers.MARK and len(mark.args) > 1:
                print(f"{module}::{name}", *mark.args[1:], sep="|")
"""
    done = started(Path(__file__).parent, "-c", code)
    marked = [line.split("|") for line in done.stdout.splitlines()]
    assert len(marked) > 5, done.stderr
    parameters = {test.partition("[")[0]: set() for test in collected(tiers.FULL)}
    for test in collected(tiers.FULL):
        parameters[test.partition("[")[0]].add(test.partition("[")[2].removeprefix("xla-").removesuffix("]"))
    for test, *ids in marked:
        lost = set(ids) - parameters[test]
        assert not lost, f"{test} has no {lost}"
