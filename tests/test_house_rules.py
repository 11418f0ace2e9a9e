# SPDX-License-Identifier: Apache-2.0
"""Core needs little, all distributions have one version, and no file names a registry or a path of one machine."""

import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
# NumPy comes with JAX, and is imported, so it is declared.
CORE_MAY_NEED = {"jax", "numpy", "jaxtyping", "typing-extensions"}
# Put together from pieces, so that this file does not contain them.
REGISTRIES = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("anaconda", "org"))]
MACHINE_PATH = re.compile(
    r"(?<![\w.\]})*>-])/(?:" + "|".join(("home", "root", "work", "Users", "opt", "mnt")) + r")/\w"
)


def test_core_needs_nothing_heavy():
    project = tomllib.loads((ROOT / "packages/ringattn-core/pyproject.toml").read_text())["project"]
    assert {re.split(r"[^A-Za-z0-9._-]", line)[0] for line in project["dependencies"]} <= CORE_MAY_NEED


def test_all_distributions_have_one_version_and_need_core_of_its_series():
    paths = [*ROOT.glob("packages/*/pyproject.toml"), ROOT / "conformance/pyproject.toml"]
    projects = [tomllib.loads(path.read_text())["project"] for path in paths]
    (version,) = {project["version"] for project in projects}
    newest = re.search(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest and newest[1] == version
    major, minor = map(int, version.split(".")[:2])
    series = f"ringattn-core>={major}.{minor},<{major}.{minor + 1}"
    for project in projects:
        others = {line for line in project["dependencies"] if re.match(r"ringattn-core\b", line)}
        assert others == ({series} if project["name"] != "ringattn-core" else set()), project["name"]


def test_no_file_names_a_registry_or_a_path_of_one_machine():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    texts = [
        ROOT / name for name in listed.split("\0") if name.endswith((".py", ".md", ".toml", ".yml", ".yaml", "run"))
    ]
    assert len(texts) > 200
    found = {
        str(path.relative_to(ROOT)): match[0]
        for path in texts
        if path.is_file()
        for text in (path.read_text(),)
        if (match := MACHINE_PATH.search(text) or re.search("|".join(map(re.escape, REGISTRIES)), text))
    }
    assert not found


def test_the_workflow_runs_the_sessions_that_ci_runs_and_hooks_have_the_versions_of_the_session_lint():
    of_ci = set(re.findall(r"^section \w+ nox -s (\w+)$", (ROOT / ".ci/run").read_text(), re.MULTILINE))
    workflow = (ROOT / ".github/workflows/ci.yml").read_text()
    assert len(of_ci) > 5
    assert {"quick", *re.findall(r"^ {10}- (\w+)(?:\(\w+\))?$", workflow, re.MULTILINE)} == of_ci
    backends = re.search(r"^BACKENDS = \((.*)\)$", (ROOT / "noxfile.py").read_text(), re.MULTILINE)
    assert backends and set(re.findall(r"conformance\((\w+)\)", workflow)) == set(re.findall(r"\w+", backends[1]))
    pins = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["lint"])
    assert set(re.findall(r"\[(\w+==[\w.]+)\]", (ROOT / ".pre-commit-config.yaml").read_text())) == pins
