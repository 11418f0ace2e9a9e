# SPDX-License-Identifier: Apache-2.0
"""The recorder of a run of pytest: it selects the tier, collects outcomes and writes the report."""

from collections.abc import Callable
from typing import Any, Final, cast

import pytest

from . import notes, run_options, summary, tiers
from .collection import Collection, Name, in_suite, name_of
from .expectations import Expectations
from .report import Run, document
from .schema import Options, Outcome, Report, write

NAME: Final = "ringattn_name"
NOTES: Final = "ringattn_notes"
"""The properties of a test report that carry the test's name and notes to the process that reports."""
COLLECTION: Final = "ringattn_collection"
"""The entry of a worker's output with its collection."""
PHASES: Final = ("setup", "call", "teardown")


class Recorder:
    """Registered in a run that uses the suite. In a worker of pytest-xdist it only collects."""

    def __init__(self, config: pytest.Config, expected: Expectations, backends: Callable[[], list[str]]) -> None:
        self.config, self.expected, self.backends = config, expected, backends
        self.run, self.collection = Run(), Collection()
        self.workers: list[Any] = []
        self.report: Report | None = None

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Any:
        """Keeps the tests of the tier. It runs before pytest or another plugin deselects tests."""
        report = yield
        if isinstance(collector, pytest.Module) and report.passed:
            tier = self.config.option.ringattn_tier
            if in_suite(collector.path):
                self.collection.add(report.result, tier)
            report.result = [node for node in report.result if _within(tier, node)]
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Marks the tests that are expected to fail."""
        for item in items:
            name = name_of(item)
            reason = self.expected.of(name.backend).get(name.test) if name and name.backend else None
            if reason is not None:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.collection.selected = {item.nodeid for item in session.items}
        output: Any = getattr(self.config, "workeroutput", None)  # only the workers of pytest-xdist have it
        if output is not None:
            output[COLLECTION] = vars(self.collection)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Keeps the workers of pytest-xdist: they collect, and all collect the same."""
        self.workers.append(node)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Adds to every failure the command that runs the test alone, and to every test its name and notes."""
        name = name_of(item)
        if name is not None and call.when == "setup":
            item.user_properties.append((NAME, (name.backend, name.test, name.parameters)))
            notes.take()
        if name is not None and call.when == "call":
            item.user_properties.append((NOTES, notes.take()))
        done = yield
        if done.failed and name is not None and name.backend:
            done.sections.append(("run this alone", self.alone(item, name.backend)))
        return done

    def alone(self, item: pytest.Item, backend: str) -> str:
        """The command that runs one test with the options of this run."""
        module, options = item.getparent(pytest.Module), self.config.option
        where = module.obj.__name__ if module is not None else ""
        line = f"pytest --pyargs '{where}::{item.name}' {run_options.BACKEND} {backend}"
        asked = {name: getattr(options, run_options.field(name)) for name in ("tier", "tolerance-factor")}
        changed = {name: x for name, x in asked.items() if x != run_options.OPTIONS[name]["default"]}
        return " ".join([line, *run_options.in_pytest(changed)])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: Any = dict(report.user_properties)
        if NAME in properties and (report.when == "call" or not report.passed):
            self.run.add(report.nodeid, Name(*properties[NAME]), outcome_of(report), properties.get(NOTES, {}))
        elif report.failed and report.when not in PHASES:
            self.run.crashes.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Writes the report, in the main process only: under pytest-xdist all outcomes arrive there."""
        if hasattr(self.config, "workerinput") or self.config.option.collectonly:
            return
        collections = [getattr(worker, "workeroutput", {}).get(COLLECTION) for worker in self.workers]
        collection = next((Collection(**found) for found in collections if found), self.collection)
        expected = {name: self.expected.of(name) for name in self.backends()}
        options: Options = {
            "tier": self.config.option.ringattn_tier,
            "largest_ring": self.config.option.ringattn_largest_ring,
            "tolerance_factor": self.config.option.ringattn_tolerance_factor,
        }
        unknown = any(collection.unknown(reasons) for reasons in expected.values())
        if unknown and exitstatus == pytest.ExitCode.OK:
            exitstatus = session.exitstatus = pytest.ExitCode.TESTS_FAILED
        self.report = document(self.run, collection, expected, options, int(exitstatus))
        if self.config.option.ringattn_report:
            write(self.config.option.ringattn_report, self.report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.report is None:
            return
        for name, backend in self.report["backends"].items():
            terminalreporter.write_sep("=", summary.title(name, backend, self.report))
            for line in summary.lines(backend, self.report):
                terminalreporter.write_line(line)


def _within(tier: str, node: Any) -> bool:
    name = name_of(node) if isinstance(node, pytest.Item) else None
    return name is None or tiers.contains(tier, tiers.tier_of(node, name.parameters))


def outcome_of(report: pytest.TestReport) -> Outcome:
    """The outcome that a report has for a test report of pytest."""
    if report.skipped:
        return "expected_failure" if hasattr(report, "wasxfail") else "skipped"
    if report.failed and str(report.longrepr).startswith("[XPASS(strict)]"):
        return "unexpected_pass"
    return cast(Outcome, report.outcome)
