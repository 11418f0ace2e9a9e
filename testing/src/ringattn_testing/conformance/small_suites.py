# SPDX-License-Identifier: Apache-2.0
"""How a test runs pytest on a suite of a few tests that takes the place of the real one."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ringattn_conformance import collection, lattice

CONFTEST = """
from pathlib import Path
import pytest
from ringattn_conformance import collection
collection.SUITE = Path(__file__).parent / "suite"

@pytest.hookimpl(trylast=True)
def pytest_configure():
    from ringattn_conformance import lattice
    lattice.untried = lambda *_: []  # these few tests try hardly anything
"""
SUITE = {
    "test_first": """
import os
import pytest
from ringattn_conformance import tiers
from ringattn_conformance.outcomes import owed
from ringattn_core import Feature

@pytest.mark.parametrize("letter", ["a", "b", "c"])
def test_letter(ringattn_backend, letter):
    with owed(ringattn_backend, [Feature.CAUSAL]):
        pass
    if letter in os.environ.get("RINGATTN_WRONG", ""):
        raise ValueError("a wrong letter")
    if letter in os.environ.get("RINGATTN_DEADLY", ""):
        os._exit(1)

@tiers.core
def test_of_the_core(ringattn_backend):
    pass
""",
    "test_second": """
from ringattn_conformance import tiers

@tiers.mark(tiers.EXHAUSTIVE)
def test_rare(ringattn_backend):
    pass
""",
}
"""Of the full tier 4 tests, of the core tier one, and one more of the exhaustive tier."""
LETTER = "test_first::test_letter"


@dataclasses.dataclass
class Done:
    """How a run ended, what it printed, and its report, where it has written one."""

    code: int
    text: str
    report: Any

    @property
    def backend(self) -> Any:
        return self.report["backends"]["xla"]

    @property
    def certificate(self) -> Any:
        return self.backend["certificate"]


def started(folder: Path, *command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A process of this Python in that folder, with none of the variables that pytest or the suite listens to."""
    kept = {name: x for name, x in os.environ.items() if not name.startswith(("PYTEST_", "XLA_FLAGS", "RINGATTN_"))}
    environment = kept | {"JAX_PLATFORMS": "cpu"} | variables
    return subprocess.run([sys.executable, *command], env=environment, cwd=folder, capture_output=True, text=True)


class SmallSuite:
    """Runs pytest in this process, or, where workers or a death are asked for, in one of its own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.monkeypatch, self.capsys = folder, monkeypatch, capsys
        (folder / "suite").mkdir()
        for name, content in SUITE.items():
            (folder / "suite" / f"{name}.py").write_text(content)
        (folder / "pytest.ini").write_text("[pytest]\n")
        (folder / "conftest.py").write_text(CONFTEST)

    def __call__(self, *arguments: str, only: str = "suite", **variables: str) -> Done:
        report = self.folder / "deep" / "report.json"
        report.unlink(missing_ok=True)
        line = ["-s", only, "--ringattn-backend", "xla", "--ringattn-report", str(report), *arguments]
        run = self._apart if "-n" in arguments else self._here
        code, text = run(line, variables)
        return Done(code, text, json.loads(report.read_text()) if report.is_file() else None)

    def _apart(self, line: list[str], variables: dict[str, str]) -> tuple[int, str]:
        done = started(self.folder, "-m", "pytest", *line, **variables)
        return done.returncode, done.stderr + done.stdout  # the verdict is the last line of what is printed

    def _here(self, line: list[str], variables: dict[str, str]) -> tuple[int, str]:
        with self.monkeypatch.context() as patch:
            for name in [name for name in os.environ if name.startswith(("PYTEST_", "RINGATTN_"))]:
                patch.delenv(name)
            for name, x in variables.items():
                patch.setenv(name, x)
            patch.chdir(self.folder)
            patch.syspath_prepend(self.folder)
            patch.setattr(collection, "SUITE", collection.SUITE)  # the conftest.py sets both
            patch.setattr(lattice, "untried", lattice.untried)
            self.capsys.readouterr()
            code = pytest.main(["-p", "no:faulthandler", "-p", "no:xdist", *line])
            for name, module in list(sys.modules.items()):
                if str(getattr(module, "__file__", None)).startswith(str(self.folder)):
                    del sys.modules[name]
        captured = self.capsys.readouterr()
        return int(code), captured.out + captured.err


def expecting(folder: Path, content: str, project: str = "") -> None:
    """A pyproject.toml in the folder, with that table of the suite's."""
    (folder / "pyproject.toml").write_text(f"{project}\n[tool.ringattn-conformance]\n{content}\n")
