# SPDX-License-Identifier: Apache-2.0
"""The recorder of a run of pytest: it selects the tier, collects outcomes and writes the results."""

from collections.abc import Callable
from typing import Any, Final

import pytest

from . import results, run_options
from .collection import Collection, Name, name_of
from .results import Results

NAME: Final = "ringattn_name"
"""The property of a test report that carries the test's `Name` from a worker to the main process."""
COLLECTION: Final = "ringattn_collection"
"""The key in a worker's output under which the main process finds the worker's `Collection`."""
PHASES: Final = ("setup", "call", "teardown")
Expected = Callable[[str], dict[str, str]]
"""From a backend to the reasons of its expected failures, by test."""


class Recorder:
    """The plugin of a run that uses the suite. In a worker of pytest-xdist it judges and writes nothing."""

    def __init__(self, config: pytest.Config, expected: Expected, backends: Callable[[], list[str]]) -> None:
        self.config, self.expected, self.backends = config, expected, backends
        self.collection = Collection()
        self.tests: dict[str, tuple[Name, str]] = {}
        self.causes: dict[tuple[str, str], str] = {}
        self.crashed: list[str] = []
        self.workers: list[Any] = []
        self.results: Results = {"backends": {}}

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_make_collect_report(self, collector: pytest.Collector) -> Any:
        """Drops tests outside this run's tier, and records all tests of the suite before pytest deselects any."""
        report = yield
        if isinstance(collector, pytest.Module) and report.passed:
            tier = self.config.option.ringattn_tier
            report.result = [node for node in report.result if self.collection.add(node, tier)]
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Marks the tests that are expected to fail."""
        for item in items:
            name = name_of(item)
            reason = self.expected(name.backend).get(name.test) if name else None
            if reason is not None:
                item.add_marker(pytest.mark.xfail(reason=reason, strict=True))

    def pytest_collection_finish(self) -> None:
        output: Any = getattr(self.config, "workeroutput", None)  # only the workers of pytest-xdist have it
        if output is not None:
            output[COLLECTION] = vars(self.collection)

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Keeps the workers of pytest-xdist for `pytest_sessionfinish`: only they collect tests, and all the same."""
        self.workers.append(node)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
        """Adds to every failure the command that runs the test alone, and to every test its name."""
        name = name_of(item)
        if name is not None and call.when == "setup":
            item.user_properties.append((NAME, tuple(name)))
        done = yield
        if done.failed and name is not None:
            if call.excinfo is not None:
                done.longrepr = self.told(call.excinfo, name.test) or done.longrepr
            done.sections.append(("run this alone", self.alone(item, name.backend)))
        return done

    def told(self, error: pytest.ExceptionInfo[BaseException], test: str) -> str | None:
        """The text that replaces the traceback of a failure; `None` keeps the traceback.

        Of a `Wrong` result it is the message. Of an error that an earlier test raised too, at the same place, it is the
        name of that test.
        """
        from .comparison import Wrong

        if isinstance(error.value, Wrong):
            return str(error.value)  # its traceback ends in the suite and never shows the backend
        first = self.causes.setdefault((error.exconly(), str(error.traceback[-1])), test)
        return None if first == test else f"{error.typename} as in {first}"

    def alone(self, item: pytest.Item, backend: str) -> str:
        """The command that runs one test with the options of this run."""
        module, options = item.getparent(pytest.Module), self.config.option
        where = module.obj.__name__ if module is not None else ""
        line = f"pytest --pyargs '{where}::{item.name}' {run_options.BACKEND} {backend}"
        asked = {"tier": options.ringattn_tier, "tolerance-factor": options.ringattn_tolerance_factor}
        changed = {name: x for name, x in asked.items() if x != run_options.OPTIONS[name]["default"]}
        changed |= {"seed": options.ringattn_seed} if "today-" in item.name else {}
        return " ".join([line, *run_options.in_pytest(changed)])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties: Any = dict(report.user_properties)
        if NAME in properties and (report.when == "call" or not report.passed):
            _, before = self.tests.get(report.nodeid, (None, None))
            if before != "failed":  # an outcome of a later phase, such as teardown, must not replace a failure
                self.tests[report.nodeid] = Name(*properties[NAME]), outcome_of(report)
        elif report.failed and report.when not in PHASES:
            self.crashed.append(report.nodeid)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Judges the run and writes the results, in the main process only: all outcomes arrive there."""
        option = self.config.option
        if hasattr(self.config, "workerinput") or option.collectonly:
            return
        collections = [getattr(worker, "workeroutput", {}).get(COLLECTION) for worker in self.workers]
        collection = next((Collection(**found) for found in collections if found), self.collection)
        backends = {name: self._of_backend(name, collection) for name in self.backends()}
        if exitstatus == pytest.ExitCode.OK and any(one["unknown"] for one in backends.values()):
            exitstatus = session.exitstatus = pytest.ExitCode.TESTS_FAILED
        factor, seed = option.ringattn_tolerance_factor, option.ringattn_seed
        options = {"tier": option.ringattn_tier, "tolerance_factor": factor, "seed": seed}
        self.results = results.of_run(options, backends, int(exitstatus))
        if option.ringattn_report:
            results.write(option.ringattn_report, self.results)

    def _of_backend(self, name: str, collection: Collection) -> Results:
        from . import lattice

        own = [(of, outcome) for of, outcome in self.tests.values() if of.backend == name]
        tests, reasons = {of.test: outcome for of, outcome in own}, self.expected(name)
        passed = {of.parameters for of, outcome in own if outcome == "passed"}
        lists = {
            "unknown": collection.unknown(reasons),
            "not_run": collection.not_run(name, self.tests),
            "uncollected": collection.uncollected,
            "untried": lattice.untried(name, self.config.option.ringattn_seed, passed),
            "crashed": self.crashed,
        }
        return results.of_backend(name, tests, lists, reasons)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for name, backend in self.results["backends"].items():
            terminalreporter.write_sep("=", name)
            for line in results.lines(backend, self.results):
                terminalreporter.write_line(line)

    def pytest_unconfigure(self, config: pytest.Config) -> None:
        """Prints each backend's verdict in one line, after everything that pytest prints."""
        reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
        for name in self.results["backends"]:
            reporter.write_line(results.verdict(name, self.results), bold=True)


def outcome_of(report: pytest.TestReport) -> str:
    """The outcome of a test report, as `results.of_backend` names it."""
    if report.skipped:
        return "expected_failure" if hasattr(report, "wasxfail") else "skipped"
    if report.failed and str(report.longrepr).startswith("[XPASS(strict)]"):
        return "unexpected_pass"
    return report.outcome
