# SPDX-License-Identifier: Apache-2.0
"""The tests of the suite, under names that are the same in every installation, and which of them a run leaves out."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import pytest

from . import tiers

SUITE: Final = Path(__file__).parent / "suite"
PARAMETER: Final = "ringattn_backend"


@dataclasses.dataclass(frozen=True)
class Name:
    """A test as reports and expectations name it, `module::test[parameters]`, and the backend it is about."""

    backend: str
    test: str
    parameters: str


def name_of(item: pytest.Item) -> Name | None:
    """The name of a test that takes a backend, as every test of the suite does; `None` for other tests."""
    spec = getattr(item, "callspec", None)
    backend = spec.params.get(PARAMETER) if spec is not None else None
    if spec is None or not isinstance(backend, str):  # pytest has a placeholder if the parameter set is empty
        return None
    parameters = spec.id.removeprefix(backend).removeprefix("-")
    test = f"{item.path.stem}::{getattr(item, 'originalname', None) or item.name}"
    return Name(backend, f"{test}[{parameters}]" if parameters else test, parameters)


def in_suite(path: Path) -> bool:
    return path.parent.resolve() == SUITE.resolve()


def modules() -> list[str]:
    return sorted(path.stem for path in SUITE.glob("test_*.py"))


@dataclasses.dataclass
class Collection:
    """The tests that one process of pytest has collected.

    `known` has the suite's tests of all tiers. `wanted` has those of this run's tier, before pytest deselects any: the
    backend and the test by pytest's node id.
    """

    known: set[str] = dataclasses.field(default_factory=set)
    wanted: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)

    def add(self, tests: Iterable[Any], tier: str) -> None:
        """Adds all tests of a module of the suite, even if the command line names only some of its tests."""
        for item in tests:
            name = name_of(item) if isinstance(item, pytest.Item) else None
            if name is not None:
                self.known.add(name.test)
                if tiers.contains(tier, tiers.tier_of(item, name.parameters)):
                    self.wanted[item.nodeid] = (name.backend, name.test)

    @property
    def uncollected(self) -> list[str]:
        """The modules of the suite without a collected test, because the command line leaves them out."""
        return sorted(set(modules()) - {test.partition("::")[0] for test in self.known})

    def not_run(self, backend: str, finished: Iterable[str]) -> list[str]:
        """The backend's tests of this run's tier that did not finish: deselected, or the run stopped before them."""
        named = (self.wanted[node] for node in set(self.wanted) - set(finished))
        return sorted(test for about, test in named if about == backend)

    def unknown(self, expected: Iterable[str]) -> list[str]:
        """The tests in `expected` that do not exist; tests of modules that were not collected are not judged."""
        elsewhere = self.uncollected
        return sorted(test for test in expected if test not in self.known and test.partition("::")[0] not in elsewhere)
