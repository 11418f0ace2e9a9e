# SPDX-License-Identifier: Apache-2.0
"""Which rules every file and every distribution of this repository keeps."""

import ast
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TREES = ("benchmarks", "conformance", "docs", "examples", "packages", "tests")
SUFFIXES = (".py", ".md", ".toml", ".yml", ".yaml", ".txt", ".cfg")
GENERATED = {"__pycache__", "build", "dist", ".pytest_cache", ".ruff_cache", ".hypothesis"}
TEXTS = sorted(
    path
    for path in (
        *ROOT.glob("*"),
        *(path for tree in TREES for path in (ROOT / tree).rglob("*")),
        *(ROOT / ".ci").glob("*"),
    )
    if path.is_file()
    and (path.suffix in SUFFIXES or path.parent.name == ".ci")
    and not GENERATED.intersection(path.relative_to(ROOT).parts)
    and not any(part.startswith((".venv", ".nox")) for part in path.relative_to(ROOT).parts)
)
MODULES = [path for path in TEXTS if path.suffix == ".py"]
PROJECTS = sorted((*ROOT.glob("packages/*/pyproject.toml"), ROOT / "conformance" / "pyproject.toml"))
LONGEST = 400
# NumPy comes with JAX, and is imported, so it is declared.
CORE_MAY_NEED = {"jax", "numpy", "jaxtyping", "typing-extensions", "importlib-metadata", "platformdirs"}
VAGUE_NAMES = {"util", "utils", "common", "helper", "helpers", "misc"}
# Put together from pieces, so that this file does not contain them.
REGISTRIES = [".".join(parts) for parts in (("pypi", "org"), ("pythonhosted", "org"), ("anaconda", "org"))]
MACHINE_PATH = re.compile(
    r"(?<![\w.\]})*>-])/(?:" + "|".join(("home", "root", "work", "Users", "opt", "mnt")) + r")/\w"
)
LEFT_OPEN = re.compile(r"\b(?:" + "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X")) + r")\b")


def named(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def project(path: Path) -> dict:
    return tomllib.loads(path.read_text())["project"]


def requirement_name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match, f"{requirement!r} names no distribution"
    return match.group()


def test_the_rules_look_at_every_tree():
    found = {path.relative_to(ROOT).parts[0] for path in TEXTS}
    assert {*TREES, ".ci", "noxfile.py", "README.md"} <= found


def breaking(paths: list[Path], complaint: Callable[[Path, str], str | None]) -> str:
    """The complaints about those files that have any, a line each."""
    found = ((path, complaint(path, path.read_text())) for path in paths)
    return "\n".join(f"{path.relative_to(ROOT)}: {text}" for path, text in found if text)


def test_a_module_says_its_licence_then_what_it_decides():
    def complaint(path: Path, text: str) -> str | None:
        lines = [line for line in text.splitlines() if not line.startswith("#!")]
        docstring = ast.get_docstring(ast.parse(text)) or ""
        if lines and lines[0] != "# SPDX-License-Identifier: Apache-2.0":
            return f"line 1 is {lines[0]!r}"
        if lines and not docstring.partition("\n")[0].endswith("."):
            return "the docstring does not open with a sentence"
        return None

    assert not (found := breaking(MODULES, complaint)), found


def test_a_module_has_at_most_400_lines():
    def complaint(path: Path, text: str) -> str | None:
        length = len(text.splitlines())
        return f"has {length} lines: it decides more than one thing" if length > LONGEST else None

    assert not (found := breaking(MODULES, complaint)), found


def test_a_function_of_the_ring_has_at_most_40_lines():
    ring = [path for path in MODULES if path.parent.name == "ring" and path.parent.parent.name == "ringattn_core"]
    lengths = [
        (path.name, function.lineno, function.name, function.end_lineno - function.lineno + 1)
        for path in ring
        for function in ast.walk(ast.parse(path.read_text()))
        if isinstance(function, ast.FunctionDef) and function.end_lineno
    ]
    assert len(lengths) > 50
    assert not (long := [one for one in lengths if one[-1] > 40]), long


def test_a_module_has_a_name_that_says_what_is_in_it():
    vague = [path for path in MODULES if path.stem in VAGUE_NAMES]
    assert not vague, f"{vague}: name each after what it decides"


def test_annotations_are_not_hidden_from_type_checkers():
    def complaint(path: Path, text: str) -> str | None:
        imports = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom))
        return "imports from __future__" if any(node.module == "__future__" for node in imports) else None

    assert not (found := breaking(MODULES, complaint)), found


def test_nothing_is_left_open():
    def complaint(path: Path, text: str) -> str | None:
        left = LEFT_OPEN.search(text)
        return f"{left.group()!r} belongs in an issue" if left else None

    assert not (found := breaking(MODULES, complaint)), found


def test_no_file_names_a_registry_or_a_path_of_one_machine():
    def complaint(path: Path, text: str) -> str | None:
        hosts = [host for host in REGISTRIES if host in text]
        machine = MACHINE_PATH.search(text)
        return f"names {hosts or machine}" if hosts or machine else None

    assert not (found := breaking(TEXTS, complaint)), found


@pytest.mark.parametrize(
    ("text", "breaks"),
    [("see /ho" + "me/me/x", True), ("-I /op" + "t/tool", True), ("[a](b/work/c)", False), ("/usr/bin/env", False)],
)
def test_a_path_of_one_machine_is_told_from_others(text: str, breaks: bool):
    assert bool(MACHINE_PATH.search(text)) == breaks


@pytest.mark.parametrize("path", PROJECTS, ids=named(PROJECTS))
def test_a_package_uses_only_public_names_of_the_others(path: Path):
    """An underscore is private to the distribution that holds it; tests of core may look at core."""
    own = project(path)["name"].replace("-", "_")
    for module in (path.parent / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(module.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0].startswith("ringattn_"):
                other = (node.module or "").split(".")[0]
                private = [name.name for name in node.names if name.name.startswith("_")]
                assert other == own or not private, f"{module}:{node.lineno} takes {private} from {other}"


def test_every_distribution_has_the_same_version():
    versions = {project(path)["name"]: project(path)["version"] for path in PROJECTS}
    assert len(versions) >= 3
    assert len(set(versions.values())) == 1, f"versions differ: {versions}"


def test_the_changelog_opens_with_that_version():
    version = project(PROJECTS[0])["version"]
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0].startswith(version), f"the first heading is {headings[0]!r}, the version {version}"


def test_core_needs_nothing_heavy():
    needed = {
        requirement_name(line) for line in project(ROOT / "packages/ringattn-core/pyproject.toml")["dependencies"]
    }
    assert needed <= CORE_MAY_NEED, f"core also needs {needed - CORE_MAY_NEED}"


@pytest.mark.parametrize("path", PROJECTS, ids=named(PROJECTS))
def test_a_distribution_is_complete(path: Path):
    declared = project(path)
    name = declared["name"]
    assert declared["license"] == "Apache-2.0"
    assert declared["requires-python"] == ">=3.11"
    assert (path.parent / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert (path.parent / "src" / name.replace("-", "_") / "py.typed").is_file()
    assert len((path.parent / declared["readme"]).read_text().splitlines()) >= 5, f"the README of {name} says nothing"


@pytest.mark.parametrize("path", PROJECTS, ids=named(PROJECTS))
def test_a_distribution_accepts_the_core_of_its_own_series(path: Path):
    declared = project(path)
    major, minor, _ = declared["version"].split(".")
    on_core = [line for line in declared["dependencies"] if requirement_name(line) == "ringattn-core"]
    series = f"ringattn-core>={major}.{minor},<{major}.{int(minor) + 1}"
    assert on_core == ([] if declared["name"] == "ringattn-core" else [series])
