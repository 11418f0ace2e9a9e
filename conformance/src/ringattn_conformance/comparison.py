# SPDX-License-Identifier: Apache-2.0
"""What changed between two reports, and which changes are for the worse."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from . import notes, summary
from .certificate import SPOILING
from .schema import BackendReport, Report

APPRECIABLE: Final = 1.5
"""Errors whose ratio is below this count as equal: two machines may differ by as much."""
ABNORMAL: Final = SPOILING | {"expected_failures": summary.OUTCOMES["expected_failure"]}
FINE: Final = "fine"
ABSENT: Final = "-"
HEADINGS: Final = ("what", "before", "after")

Row = tuple[str, str, str]


def pairs(before: Report, after: Report) -> list[tuple[str, BackendReport | None, BackendReport | None]]:
    """The backends of both reports, matched by name; if each report has one backend, those two are compared."""
    old, new = before["backends"], after["backends"]
    if len(old) == len(new) == 1:
        (a, before_one), (b, after_one) = *old.items(), *new.items()
        return [(a if a == b else f"{a} -> {b}", before_one, after_one)]
    return [(name, old.get(name), new.get(name)) for name in sorted({*old, *new})]


def lines(before: Report, after: Report) -> list[str]:
    """A table of versions, devices and options, and one for each backend; only with the rows that changed."""
    found = _section("the runs", _changed(_of_runs(before), _of_runs(after)))
    for name, old, new in pairs(before, after):
        if old is None or new is None:
            found += [f"backend {name}: only in the {'second' if old is None else 'first'} report", ""]
        else:
            found += _section(f"backend {name}", [*_changed(_of_backend(old), _of_backend(new)), *_errors(old, new)])
    return found[:-1]


def worse(before: Report, after: Report) -> list[str]:
    """A sentence for each backend, test, feature or certificate that is lost."""
    found = []
    for name, old, new in pairs(before, after):
        if new is None:
            found.append(f"{name} is no longer there")
        if old is None or new is None:
            continue
        was, now = (set(one["failed"]) | set(one["unexpected_passes"]) for one in (old, new))
        found += [f"{name}: {test} fails" for test in sorted(now - was)]
        lost = {feature for feature, was in old["features"].items() if was["support"] == "FULL"}
        lost -= {feature for feature, now in new["features"].items() if now["support"] == "FULL"}
        found += [f"{name}: {feature} is no longer supported" for feature in sorted(lost)]
        if old["certificate"]["given"] and not new["certificate"]["given"]:
            found.append(f"{name}: {summary.verdict(new)}")
    return found


def _of_runs(report: Report) -> dict[str, str]:
    devices = report["devices"]
    return {
        "date": report["date"],
        **{f"{name}": str(version) for name, version in report["versions"].items()},
        **{f"${name}": value for name, value in report["environment"].items()},
        "devices": f"{devices['count']} {devices['platform']} {devices['kind']}",
        **{name.replace("_", " "): str(value) for name, value in report["options"].items()},
        "files left out": ", ".join(report["uncollected"]) or "none",
    }


def _of_backend(backend: BackendReport) -> dict[str, str]:
    found = {
        "certificate": summary.verdict(backend),
        "version": backend["version"],
        "kind": backend["kind"],
        **{f"requires {name}": str(version) for name, version in backend["requires"].items()},
        **{f"{summary.OUTCOMES[key]}, in all": str(backend["outcomes"].get(key, 0)) for key in summary.OUTCOMES},
        **{f"a ring of {ranks}": _kinds(counts) for ranks, counts in backend["rings"].items()},
    }
    for name, feature in backend["features"].items():
        found[name] = feature["support"].lower()
    lists: Any = backend
    for key, what in ABNORMAL.items():
        found |= {f"test {test}": what for test in lists[key]}
    return found


def _kinds(counts: Mapping[str, int]) -> str:
    return " and ".join(f"{count} tests {how}" for how, count in counts.items() if count)


def _changed(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[Row]:
    for name in dict.fromkeys((*before, *after)):
        neither = FINE if name.startswith("test ") else ABSENT
        was, now = before.get(name, neither), after.get(name, neither)
        if was != now:
            yield name, was, now


def _errors(old: BackendReport, new: BackendReport) -> Iterator[Row]:
    was, now = _shares(old), _shares(new)
    for name in sorted(was.keys() | now.keys()):
        low, high = sorted(found.get(name, 0.0) for found in (was, now))
        if high > APPRECIABLE * low:
            yield f"worst error of {name}", _percent(was.get(name)), _percent(now.get(name))


def _percent(share: float | None) -> str:
    return ABSENT if share is None else f"{share:.1%} of tolerance"


def _shares(backend: BackendReport) -> dict[str, float]:
    worst: Any = backend["worst"]
    return {f"{result}, {dtype}": notes.share(one) for dtype, found in worst.items() for result, one in found.items()}


def _section(title: str, rows: Iterable[Row]) -> list[str]:
    rows = list(rows)
    return [f"{title}:", *(summary.table((HEADINGS, *rows)) if rows else ["nothing changed"]), ""]
