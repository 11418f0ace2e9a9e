# SPDX-License-Identifier: Apache-2.0
"""The failures that a backend's pyproject.toml expects, each with a reason."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest

TABLE: Final = "ringattn-conformance"
KEY: Final = "expected-failures"
GROUP: Final = "ringattn.backends"
DEFAULT: Final = "pyproject.toml"


@dataclasses.dataclass(frozen=True)
class Expectations:
    """The failures that a pyproject.toml expects: `reasons` has the reason for each test id.

    The reasons apply to `backends`, the backends that the file registers. If it registers none, they apply to all.
    """

    reasons: dict[str, str] = dataclasses.field(default_factory=dict)
    backends: frozenset[str] = frozenset()

    def of(self, backend: str) -> dict[str, str]:
        return self.reasons if not self.backends or backend in self.backends else {}


def read(given: Path | None, folder: Path) -> Expectations:
    """Reads the file `given`, or else `pyproject.toml` in `folder` if there is one; raises UsageError if malformed."""
    path = folder / (given or DEFAULT)
    if given is None and not path.is_file():
        return Expectations()
    try:
        content = tomllib.loads(path.read_text())
    except OSError as error:
        raise pytest.UsageError(f"--ringattn-expectations {path}: {error.strerror}. Name a pyproject.toml") from error
    except tomllib.TOMLDecodeError as error:
        raise pytest.UsageError(f"{path} is not TOML: {error}. Correct it, or name another file") from error
    table = content.get("tool", {}).get(TABLE, {})
    unknown = sorted(set(table) - {KEY})
    if unknown:
        raise pytest.UsageError(f"{path}: [tool.{TABLE}] has {unknown[0]!r}. It may have {KEY!r}, and nothing else")
    reasons = table.get(KEY, {})
    _check(reasons, path)
    registered = content.get("project", {}).get("entry-points", {}).get(GROUP, {})
    return Expectations(reasons, frozenset(registered))


def _check(reasons: Any, path: Path) -> None:
    where = f"{path}: [tool.{TABLE}] {KEY}"
    if not isinstance(reasons, dict):
        raise pytest.UsageError(f'{where} is {reasons!r}. Make it a table: {{"test id" = "reason"}}')
    for test, reason in reasons.items():
        if not isinstance(reason, str) or not reason.strip():
            raise pytest.UsageError(f"{where}: {test!r} has the reason {reason!r}. Say in a sentence why it fails")
