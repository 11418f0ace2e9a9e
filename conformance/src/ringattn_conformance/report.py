# SPDX-License-Identifier: Apache-2.0
"""What a run of the suite leaves behind: versions, devices, features, outcomes, and the worst error of each result."""

import dataclasses
import datetime
import json
import platform
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, Final

FORMAT: Final = 1
PROPERTY: Final = "ringattn_worst"
"""Under which name a test's errors travel from the process that ran it to the one that reports."""

_NAME: Final = re.compile(r"[\w.-]+")

Worst = dict[str, dict[str, dict[str, float]]]
"""By dtype and result: the error that came nearest to its tolerance, and that tolerance."""


@dataclasses.dataclass
class Run:
    """What has been reported so far."""

    outcomes: dict[str, Counter[str]] = dataclasses.field(default_factory=dict)
    failed: list[str] = dataclasses.field(default_factory=list)
    worst: dict[str, Worst] = dataclasses.field(default_factory=dict)

    def add(self, backend: str, name: str, outcome: str, errors: Worst) -> None:
        """One test's outcome; of its errors only those that are worse than any before stay."""
        self.outcomes.setdefault(backend, Counter())[outcome] += 1
        if outcome == "failed":
            self.failed.append(name)
        known = self.worst.setdefault(backend, {})
        for dtype, results in errors.items():
            for result, found in results.items():
                before = known.setdefault(dtype, {}).get(result)
                if before is None or _share(found) > _share(before):
                    known[dtype][result] = found


def _share(found: Mapping[str, float]) -> float:
    return found["error"] / found["tolerance"] if found["tolerance"] else found["error"]


def document(run: Run, about: Mapping[str, Any]) -> dict[str, Any]:
    """The whole report, as JSON takes it."""
    import jax
    from ringattn_core import discovery

    devices = jax.devices()
    backends = {}
    for name, outcomes in run.outcomes.items():
        found = discovery.registrations()[name]
        descriptor = found.descriptor()
        backends[name] = {
            "distribution": found.distribution,
            "version": found.version,
            "requires": _installed(metadata.requires(found.distribution) or ()),
            "api": descriptor.api,
            "features": {feature.name: support.name for feature, support in descriptor.features.items()},
            "outcomes": dict(outcomes),
            "worst": run.worst.get(name, {}),
        }
    return {
        "format": FORMAT,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "devices": {"platform": devices[0].platform, "kind": devices[0].device_kind, "count": len(devices)},
        **about,
        "failed": sorted(run.failed),
        "backends": backends,
    }


def _installed(requirements: Iterable[str]) -> dict[str, str | None]:
    """The version of each distribution that a backend requires; `None` where it is not there."""
    names = [match[0] for match in map(_NAME.match, requirements) if match]
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found


def write(path: Path, content: Any) -> None:
    """The report as a file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    partial.replace(path)
