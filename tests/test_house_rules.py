# SPDX-License-Identifier: Apache-2.0
"""What whoever installs a distribution relies on: its licence, its versions, and how little core needs."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECTS = sorted((*ROOT.glob("packages/*/pyproject.toml"), ROOT / "conformance" / "pyproject.toml"))
# NumPy comes with JAX, and is imported, so it is declared.
CORE_MAY_NEED = {"jax", "numpy", "jaxtyping", "typing-extensions", "importlib-metadata", "platformdirs", "filelock"}
# Put together from pieces, so that this file does not contain them.
REGISTRIES = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("anaconda", "org"))]
MACHINE_PATH = re.compile(
    r"(?<![\w.\]})*>-])/(?:" + "|".join(("home", "root", "work", "Users", "opt", "mnt")) + r")/\w"
)

each = pytest.mark.parametrize("path", PROJECTS, ids=lambda path: path.parent.name)


def project(path: Path) -> dict:
    return tomllib.loads(path.read_text())["project"]


def requirement_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, f"{requirement!r} names no distribution"
    return match.group()


def test_core_needs_nothing_heavy():
    declared = project(ROOT / "packages/ringattn-core/pyproject.toml")["dependencies"]
    assert {requirement_name(line) for line in declared} <= CORE_MAY_NEED


def test_every_distribution_has_the_version_with_which_the_changelog_opens():
    versions = {project(path)["version"] for path in PROJECTS}
    assert len(PROJECTS) >= 5 and len(versions) == 1, versions
    (heading, *_) = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert heading.startswith(versions.pop())


@each
def test_a_distribution_accepts_the_core_of_its_own_series(path: Path):
    declared = project(path)
    major, minor, _ = declared["version"].split(".")
    on_core = [line for line in declared["dependencies"] if requirement_name(line) == "ringattn-core"]
    series = f"ringattn-core>={major}.{minor},<{major}.{int(minor) + 1}"
    assert on_core == ([] if declared["name"] == "ringattn-core" else [series])


def test_no_file_names_a_registry_or_a_path_of_one_machine():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = [ROOT / name for name in listed.split("\0") if name.endswith((".py", ".md", ".toml", ".yml", "run"))]
    assert len(texts) > 200
    found = {
        str(path.relative_to(ROOT)): match[0]
        for path in texts
        if path.is_file()
        for text in (path.read_text(),)
        if (match := MACHINE_PATH.search(text) or re.search("|".join(map(re.escape, REGISTRIES)), text))
    }
    assert not found
