# SPDX-License-Identifier: Apache-2.0
"""Which package may import which: arrows go down, never round, and a backend sees only what core declares."""

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CORE = ROOT / "packages/ringattn-core/src/ringattn_core"
# From the top down: a room imports from its own row, and from the rows below it.
ROOMS = (
    ("cli", "adapters"),
    ("call",),
    ("tuning",),
    ("ring",),
    ("backends",),
    ("contract",),
    ("masks",),
    ("placement",),
)
OUTSIDE_A_ROOM = {"__init__.py", "__main__.py", "config.py", "errors.py", "py.typed"}
ROW = {room: number for number, row in enumerate(ROOMS) for room in row}
BACKENDS = ("triton", "tpu", "xla")
# What a backend may name of core, beside the names of `ringattn_core` itself.
DECLARED = ("ringattn_core.contract", "ringattn_core.tuning", "ringattn_core.errors", "ringattn_core.masks")


def imported(path: Path, source: Path, text: str | None = None) -> Iterator[str]:
    """The modules that a file imports, each by its full name; a relative import is resolved below `source`."""
    package = path.relative_to(source).parent.parts
    for node in ast.walk(ast.parse(path.read_text() if text is None else text)):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from . import name` imports the module `name`, and `from .module import name` the module.
            inside = (source / module.replace(".", "/")).is_dir()
            yield from (f"{module}.{name.name}" if inside else module for name in node.names)


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


def undeclared(modules: Iterable[str]) -> list[str]:
    """The imports of a backend that reach past the declared surface of core."""
    surface = (*DECLARED, "ringattn_core")
    return [
        module
        for module in modules
        if module.startswith("ringattn_core")
        and module not in surface
        and not module.startswith(tuple(f"{name}." for name in DECLARED))
        and room_of(module) is not None
    ]


def test_nothing_of_core_stands_outside_a_room() -> None:
    standing = {path.name for path in CORE.iterdir() if path.name != "__pycache__"}
    assert standing == {*OUTSIDE_A_ROOM, *ROW}


def test_arrows_between_the_rooms_of_core_go_down() -> None:
    files = [path for path in CORE.rglob("*.py") if path.parent != CORE]
    assert len(files) > 50, "the search found too few files to mean anything"
    found = [line for path in files for line in upward(path, imported(path, CORE.parent))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("room", sorted(ROW))
def test_a_room_says_what_it_decides(room: str) -> None:
    docstring = ast.get_docstring(ast.parse((CORE / room / "__init__.py").read_text())) or ""
    assert docstring.partition("\n")[0].rstrip(".:"), f"{room} has no sentence"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_imports_only_what_core_declares(backend: str) -> None:
    source = ROOT / f"packages/ringattn-{backend}/src"
    found = {path: undeclared(imported(path, source)) for path in source.rglob("*.py")}
    assert not (reaching := {str(path): modules for path, modules in found.items() if modules}), reaching


@pytest.mark.parametrize(
    ("text", "caught"),
    [
        ("from ..call.sharding import sharded", True),
        ("from .. import call", True),
        ("import ringattn_core.adapters.flax", True),
        ("from ..errors import InputError\nfrom . import axes", False),
    ],
)
def test_an_arrow_that_goes_up_is_caught(text: str, caught: bool) -> None:
    path = CORE / "placement" / "layout.py"
    assert bool(upward(path, imported(path, CORE.parent, text))) == caught


@pytest.mark.parametrize(
    ("text", "caught"),
    [
        ("from ringattn_core.ring.hops import plan", True),
        ("from ringattn_core.placement.axes import size", True),
        ("from ringattn_core.contract.tiles import tiles\nfrom ringattn_core import FwdParams", False),
    ],
)
def test_a_backend_that_reaches_past_the_surface_is_caught(text: str, caught: bool) -> None:
    source = ROOT / "packages/ringattn-xla/src"
    path = source / "ringattn_xla" / "block.py"
    assert bool(undeclared(imported(path, source, text))) == caught
