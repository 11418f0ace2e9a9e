# SPDX-License-Identifier: Apache-2.0
"""What a report of a run looks like as JSON, and how one is read back."""

import json
from pathlib import Path
from typing import Final, Literal, NotRequired, TypedDict, cast

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

    `support` is "FULL" or `UNDECLARED`. `tried` counts by dtype the tests that passed and
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
    return cast(Report, content)


def write(path: Path, content: Report) -> None:
    """The report as a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    partial.replace(path)
