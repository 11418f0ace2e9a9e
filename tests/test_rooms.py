# SPDX-License-Identifier: Apache-2.0
"""Which module may import which: arrows go down and form no circle, and a backend imports only what core declares."""

import ast
import graphlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "packages/ringattn-core/src/ringattn_core"
# From the top down: a room imports from its own row, and from the rows below it.
ROOMS = (
    ("call",),
    ("strategies",),
    ("tuning",),
    ("ring",),
    ("backends",),
    ("contract",),
    ("masks",),
    ("placement",),
)
ROW = {room: number for number, row in enumerate(ROOMS) for room in row}
BACKENDS = ("triton", "tpu", "xla")
PACKAGES = ("core", "tools", "adapters", "sparse", *BACKENDS)
SOURCES = {
    **{f"ringattn_{name}": ROOT / f"packages/ringattn-{name}/src" for name in PACKAGES},
    "ringattn_conformance": ROOT / "conformance/src",
}
# What a backend may import of core beside public names. `masks` is a public name that is a package.
DECLARED = ("ringattn_core.contract", "ringattn_core.tuning", "ringattn_core.errors")
PUBLIC = ("ringattn_core", "ringattn_core.masks")


def imported(path: Path, source: Path, text: str | None = None) -> Iterator[str]:
    """The modules that a file imports, each by its full name; a relative import is resolved below `source`."""
    package = path.relative_to(source).parent.parts
    for node in ast.walk(ast.parse(path.read_text() if text is None else text)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{name.name}" if _is_module(module, name.name) else module for name in node.names)


def _is_module(package: str, name: str) -> bool:
    """Whether `from package import name` imports a module of ours."""
    source = SOURCES.get(package.split(".")[0])
    inside = source and source / package.replace(".", "/")
    return bool(inside) and inside.is_dir() and ((inside / name).is_dir() or (inside / f"{name}.py").is_file())


def modules(package: str) -> dict[str, Path]:
    """Every module of a package by its full name; a package stands for its `__init__.py`."""
    source = SOURCES[package]
    paths = {path.relative_to(source).with_suffix(""): path for path in (source / package).rglob("*.py")}
    return {".".join(name.parts).removesuffix(".__init__"): path for name, path in paths.items()}


def module_graph(package: str) -> dict[str, set[str]]:
    """Which modules of a package each of its modules imports."""
    known = modules(package)
    return {
        name: {other for other in imported(path, SOURCES[package]) if other in known and other != name}
        for name, path in known.items()
    }


def folder_graph(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The same between the folders and files that stand at the top of the package; its `__init__.py` stands aside."""
    found: dict[str, set[str]] = {}
    for name, others in graph.items():
        if "." in name:
            tops = {other.split(".")[1] for other in others if "." in other}
            found.setdefault(name.split(".")[1], set()).update(tops - {name.split(".")[1]})
    return found


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Some modules that import each other in a circle, if any do."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def room_of(module: str) -> str | None:
    parts = module.split(".")
    return parts[1] if parts[0] == "ringattn_core" and len(parts) > 1 and parts[1] in ROW else None


def upward(path: Path, modules: Iterable[str]) -> list[str]:
    """The imports of one file of core that lead to a room above its own, or into another room of its row."""
    own = path.relative_to(CORE).parts[0]
    found = []
    for module in modules:
        room = room_of(module)
        allowed = room is None or room == own or ROW[room] > ROW[own]
        if not allowed:
            found.append(f"{path.relative_to(CORE)} imports {module}")
    return found


def undeclared(modules: Iterable[str], declared: tuple[str, ...] = DECLARED) -> list[str]:
    """The imports of a distribution that reach past the public names of core and the `declared` modules."""
    inside = tuple(f"{name}." for name in declared)
    of_core = [module for module in modules if module.split(".")[0] == "ringattn_core"]
    return [module for module in of_core if module not in (*PUBLIC, *declared) and not module.startswith(inside)]


@pytest.mark.parametrize("package", SOURCES)
def test_modules_import_each_other_in_no_circle(package: str) -> None:
    graph = module_graph(package)
    assert len(graph) > 5 and any(graph.values()), "the search found too few modules to mean anything"
    assert not (found := circle(graph)), " -> ".join(found)
    assert not (found := circle(folder_graph(graph))), " -> ".join(found)


def test_arrows_between_the_rooms_of_core_go_down() -> None:
    files = [path for path in CORE.rglob("*.py") if path.parent != CORE]
    assert len(files) > 50, "the search found too few files to mean anything"
    found = [line for path in files for line in upward(path, imported(path, CORE.parent))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_imports_only_what_core_declares(backend: str) -> None:
    source = ROOT / f"packages/ringattn-{backend}/src"
    found = {path: undeclared(imported(path, source)) for path in source.rglob("*.py")}
    assert not (reaching := {str(path): modules for path, modules in found.items() if modules}), reaching


def test_the_adapters_import_only_public_names_of_core_and_its_errors() -> None:
    source = ROOT / "packages/ringattn-adapters/src"
    found = {path: undeclared(imported(path, source), ("ringattn_core.errors",)) for path in source.rglob("*.py")}
    assert len(found) > 5, "the search found too few files to mean anything"
    assert not (reaching := {str(path): modules for path, modules in found.items() if modules}), reaching


def test_choosing_keys_imports_only_what_core_declares() -> None:
    source = ROOT / "packages/ringattn-sparse/src"
    declared = ("ringattn_core.contract", "ringattn_core.errors")
    found = {path: undeclared(imported(path, source), declared) for path in source.rglob("*.py")}
    assert len(found) > 5, "the search found too few files to mean anything"
    assert not (reaching := {str(path): modules for path, modules in found.items() if modules}), reaching


def test_a_circle_is_caught() -> None:
    graph = {"p.a.x": {"p.b.y"}, "p.b.y": {"p.c"}, "p.b.z": {"p.a.w"}, "p.c": set(), "p.a.w": set()}
    assert not circle(graph)
    assert set(circle(folder_graph(graph))) == {"a", "b"}
    assert set(circle({**graph, "p.c": {"p.a.x"}})) == {"p.a.x", "p.b.y", "p.c"}


@pytest.mark.parametrize(
    ("text", "up", "past"),
    [
        ("from ..call.sharding import sharded", True, True),
        ("from .. import call", True, True),
        ("import ringattn_core.placement.axes", False, True),
        ("from ringattn_core.masks.builder import build", True, True),
        ("from ringattn_core.contract.tiles import tiles\nfrom ringattn_core import FwdParams, masks", True, False),
        ("from ..errors import InputError\nfrom . import axes", False, True),
    ],
)
def test_an_import_that_goes_up_or_past_the_surface_is_caught(text: str, up: bool, past: bool) -> None:
    path = CORE / "placement" / "layout.py"
    found = list(imported(path, CORE.parent, text))
    assert (bool(upward(path, found)), bool(undeclared(found))) == (up, past)
