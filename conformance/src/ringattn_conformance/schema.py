# SPDX-License-Identifier: Apache-2.0
"""What a report of a run looks like as JSON, and how one is read back."""

import json
import types
import typing
from pathlib import Path
from typing import Any, Final, Literal, NotRequired, TypedDict, get_args, get_origin

FORMAT: Final = 2
"""The version of the format: raised when a field is removed or changes its meaning, not when one is added."""

UNDECLARED: Final = "UNDECLARED"
"""The support of a feature of which the backend's descriptor says nothing."""

Outcome = Literal["passed", "failed", "expected_failure", "unexpected_pass", "skipped"]


class Error(TypedDict):
    """How far a result was from the oracle's, its tolerance, and the id of the test."""

    error: float
    tolerance: float
    test: str


class Nearest(Error):
    """Of all results of tests that need a feature, the one whose error is the largest part of its tolerance."""

    dtype: str
    result: str


class FeatureReport(TypedDict):
    """A feature: how it is declared, the outcomes of the tests that need it, and how many tests expect a refusal.

    `support` is a name of `ringattn_core.Support`, or `UNDECLARED`. `tried` counts by dtype the tests that passed and
    compared the numbers of a call that needs the feature.
    """

    support: str
    outcomes: dict[str, int]
    refusals: int
    worst: Nearest | None
    tried: NotRequired[dict[str, int]]


class Certificate(TypedDict):
    """Whether the backend is certified for the tier; where not, why, a sentence each."""

    given: bool
    tier: str
    spoiled_by: list[str]


class BackendReport(TypedDict):
    """One backend: what it is, the results of its tests, and which tests did not run, by id.

    `untried` has a sentence, such as "BIAS in bfloat16", for each declared feature and declared dtype that no passing
    test compared with the oracle. `uncovered` has one, such as "BIAS with ring of 4", for each two of the features,
    layouts and ring sizes that no such test had together. `half_partials` is copied from the backend's descriptor.
    """

    distribution: str
    version: str
    requires: dict[str, str | None]
    api: int
    kind: str
    certificate: Certificate
    outcomes: dict[str, int]
    failed: list[str]
    skipped: list[str]
    expected_failures: dict[str, str]
    unexpected_passes: list[str]
    unknown_expectations: list[str]
    deselected: list[str]
    not_run: list[str]
    rings: dict[str, dict[str, int]]
    features: dict[str, FeatureReport]
    worst: dict[str, dict[str, Error]]
    half_partials: NotRequired[bool]
    untried: NotRequired[list[str]]
    uncovered: NotRequired[list[str]]


class Devices(TypedDict):
    platform: str
    kind: str
    count: int


class Options(TypedDict):
    """The options of the run."""

    tier: str
    largest_ring: int
    tolerance_factor: float


class Report(TypedDict):
    """The whole file."""

    format: int
    date: str
    versions: dict[str, str | None]
    environment: dict[str, str]
    devices: Devices
    options: Options
    uncollected: list[str]
    crashes: list[str]
    exit_status: int
    backends: dict[str, BackendReport]


def read(path: Path) -> Report:
    """Reads the report in a file. Raises ValueError, with a remedy, if the file is not a report of this format."""
    try:
        content = json.loads(path.read_text())
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}. Name a report that --ringattn-report wrote") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}. Name a report that --ringattn-report wrote") from error
    given = content.get("format") if isinstance(content, dict) else None
    if given != FORMAT:
        raise ValueError(f"{path} has the format {given!r}, this program reads {FORMAT}. Run the suite again")
    wrong = fault(content, Report, "the report")
    if wrong:
        raise ValueError(f"{path}: {wrong}. Run the suite again")
    return typing.cast(Report, content)


def fault(value: Any, kind: Any, where: str) -> str | None:
    """The first place where a JSON value does not match the type `kind`, or `None`. Unknown fields are allowed."""
    if typing.is_typeddict(kind):
        return _fault_of_fields(value, kind, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is types.UnionType:
        faults = [fault(value, one, where) for one in arguments]
        return None if None in faults else faults[0]
    if origin in (dict, list):
        if not isinstance(value, origin):
            return f"{where} is {value!r}, not a {origin.__name__}"
        items = value.items() if isinstance(value, dict) else enumerate(value)
        found = (fault(x, arguments[-1], f"{where}[{key!r}]") for key, x in items)
        return next((one for one in found if one), None)
    whole = (int, float) if kind is float else kind
    fits = isinstance(value, whole) and (kind is bool or not isinstance(value, bool))
    return None if fits else f"{where} is {value!r}, not {getattr(kind, '__name__', kind)}"


def _fault_of_fields(value: Any, kind: Any, where: str) -> str | None:
    if not isinstance(value, dict):
        return f"{where} is {value!r}, not a dict"
    for name, wanted in typing.get_type_hints(kind, include_extras=True).items():
        optional = get_origin(wanted) is NotRequired
        if name not in value and not optional:
            return f"{where} lacks {name!r}"
        if name in value:
            found = fault(value[name], get_args(wanted)[0] if optional else wanted, f"{where}[{name!r}]")
            if found:
                return found
    return None


def write(path: Path, content: Report) -> None:
    """The report as a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    partial.replace(path)
