# SPDX-License-Identifier: Apache-2.0
"""Names the suite's tests, records which of them a run has, and reads which may fail."""

import dataclasses
import functools
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest

from . import tiers

SUITE: Final = Path(__file__).parent / "suite"
PARAMETER: Final = "ringattn_backend"
KEY: Final = "expected-failures"
GROUP: Final = "ringattn.backends"


class Name(NamedTuple):
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


@functools.cache
def _resolved(folder: Path) -> Path:
    return folder.resolve()


def modules() -> list[str]:
    return sorted(path.stem for path in SUITE.glob("test_*.py"))


@dataclasses.dataclass
class Collection:
    """The tests of the suite that one process of pytest has collected.

    `known` has those of all tiers. `wanted` has those of this run's tier, before pytest deselects any: the
    backend and the test by pytest's node id.
    """

    known: set[str] = dataclasses.field(default_factory=set)
    wanted: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)

    def add(self, node: pytest.Item | pytest.Collector, tier: str) -> bool:
        """Records a test of the suite. Returns whether the run keeps the node: not if it is a test beyond the tier."""
        if not isinstance(node, pytest.Item) or (name := name_of(node)) is None:
            return True
        held = tiers.contains(tier, tiers.tier_of(node, name.parameters))
        if _resolved(node.path.parent) == _resolved(SUITE):
            self.known.add(name.test)
            if held:
                self.wanted[node.nodeid] = (name.backend, name.test)
        return held

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


def expected_failures(given: Path | None, folder: Path) -> Callable[[str], dict[str, str]]:
    """Reads the failures that a pyproject.toml expects; returns a function from a backend to reasons by test.

    The file is `given`, or else `pyproject.toml` in `folder` if there is one. If it registers backends, the table is of
    these only. Raises UsageError if the file or its table is malformed.
    """
    path = folder / (given or "pyproject.toml")
    try:
        content = tomllib.loads(path.read_text()) if given or path.is_file() else {}
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise pytest.UsageError(f"{path} cannot be read: {error}. Correct it, or name another file") from error
    table = content.get("tool", {}).get("ringattn-conformance", {})
    reasons: Any = table.get(KEY, {})
    if {*table} - {KEY} or not isinstance(reasons, dict) or not all(map(_is_reason, reasons.values())):
        remedy = f'It may have {KEY!r} alone, a table {{"test id" = "why it fails"}}'
        raise pytest.UsageError(f"{path}: [tool.ringattn-conformance] is {table}. {remedy}")
    registered = content.get("project", {}).get("entry-points", {}).get(GROUP, {})
    return lambda backend: reasons if not registered or backend in registered else {}


def _is_reason(x: Any) -> bool:
    return isinstance(x, str) and bool(x.strip())
