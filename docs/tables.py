# SPDX-License-Identifier: Apache-2.0
"""Makes the parts of documents that follow from the code: tables and listings. Run this file to update them."""

import ast
import dataclasses
import functools
import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from ringattn_core import Backend, Block, Feature, Rule

ROOT = Path(__file__).parent.parent
SABOTEURS = ROOT / "conformance" / "tests"
ARGUMENT = re.compile(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", re.MULTILINE | re.DOTALL)


def descriptors() -> list[Backend]:
    """The descriptors of the backends in this repository, sorted by name."""
    found = {}
    for path in ROOT.glob("packages/*/pyproject.toml"):
        points = tomllib.loads(path.read_text())["project"].get("entry-points", {}).get("ringattn.backends", {})
        for name, place in points.items():
            module, attribute = place.split(":")
            found[name] = getattr(importlib.import_module(module), attribute)
    return [found[name] for name in sorted(found)]


def backends() -> str:
    """The table of backends: a row for each feature, a column for each backend."""
    columns = descriptors()
    names = " | ".join(f"`{backend.name}`" for backend in columns)
    platforms = " | ".join(", ".join(backend.platforms) for backend in columns)
    rows = [f"| feature | what it is | {names} |", "|---|---|" + "---|" * len(columns), f"| | runs on | {platforms} |"]
    for feature in Feature:
        answers = " | ".join("yes" if backend.supports(feature) else "no" for backend in columns)
        rows.append(f"| `{feature.name}` | {feature.value} | {answers} |")
    return "\n".join(rows)


def saboteurs() -> str:
    """The table of saboteurs: how each is broken, and which tests of the suite catch it."""
    sys.path.insert(0, str(SABOTEURS))
    try:
        broken = importlib.import_module("saboteurs").SABOTEURS
        partly = importlib.import_module("test_broken_blocks_are_caught").BREAKS
    finally:
        sys.path.remove(str(SABOTEURS))
    rows = ["| saboteur | how it is broken | caught by |", "|---|---|---|"]
    for name, sabotage in broken.items():
        tests = ", ".join(f"`{test}`" for test in dict.fromkeys(short(test) for test in sabotage.caught_by))
        rows.append(f"| `{name}` | {inspect.getdoc(type(sabotage.kernel))} | {tests} |")
    of_tier = {True: "calls of the core tier", False: "calls of the full tier"}
    rows += [f"| `{name}` | {one.fault} | {of_tier[one.core]} |" for name, one in partly.items()]
    return "\n".join(rows)


def short(test: str) -> str:
    """The id of a test without its parameters and its folders."""
    return test.split("[")[0].rsplit("/")[-1]


def fields(kind: Any) -> str:
    """The table of the fields of a dataclass, from the `Args:` of its docstring and from its annotations."""
    _, _, listed = (inspect.getdoc(kind) or "").partition("Args:\n")
    told = {name: " ".join(text.split()) for name, text in ARGUMENT.findall(listed)}
    rows = [(f"`{field.name}`", written(field.type), told[field.name]) for field in dataclasses.fields(kind)]
    escaped = [" | ".join(cell.replace("|", r"\|") for cell in row) for row in rows]
    return "\n".join(["| field | type | what it is |", "|---|---|---|", *(f"| {row} |" for row in escaped)])


def written(kind: Any) -> str:
    """A type as the table shows it: an array by its axes and dtype, `None` as "or `None`"."""
    parts = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    if any(get_origin(part) is tuple and hasattr(get_args(part)[0], "dim_str") for part in parts):
        return "one array, or a pair"  # the keys and values
    dtypes = {"Float": "floating"}
    arrays = [(x.dim_str.split(), x.dtype.__name__) for x in parts if hasattr(x, "dim_str")]
    named = [f"`[{', '.join(axes)}]` {dtypes.get(dtype, dtype.lower())}" for axes, dtype in arrays]
    named += [f"`{formatted(part)}`" for part in parts if not hasattr(part, "dim_str") and part is not NoneType]
    return " or ".join(named + ["`None`"] * (NoneType in parts))


def formatted(kind: Any) -> str:
    """A type that is not an array, without the names of modules."""
    text = kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
    return re.sub(r"\b(?:\w+\.)+", "", text)


def code(path: Path) -> str:
    """The text of a file as a block of code, without its licence line."""
    _, _, text = path.read_text().partition("\n")
    return f"```python\n{text}```"


def lines_of_code(path: Path) -> int:
    """How many lines of a Python file are code: not blank, no comment, no docstring."""
    tree = ast.parse(path.read_text())
    strings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(path.read_text().splitlines(), 1)
    return sum(bool(text.strip()) and not text.lstrip().startswith("#") and n not in strings for n, text in lines)


def sizes() -> str:
    """The table of the examples: the lines of code of the descriptor, and of the kernel."""
    rows = ["| example | descriptor | kernel | together |", "|---|---|---|---|"]
    for folder, plugin, kernel in EXAMPLES:
        numbers = [lines_of_code(ROOT / "examples" / folder / path) for path in (plugin, kernel)]
        rows.append(f"| `examples/{folder}` | {numbers[0]} | {numbers[1]} | {sum(numbers)} |")
    return "\n".join(rows)


EXAMPLES = (
    ("third-party-backend", "src/ringattn_example/plugin.py", "src/ringattn_example/block.py"),
    ("third-party-flash3", "src/ringattn_example_flash3/plugin.py", "src/ringattn_example_flash3/kernel.py"),
    ("third-party-ring", "src/ringattn_example_ring/plugin.py", "src/ringattn_example_ring/gather.py"),
)
BLOCK, FLASH3, RING = ([ROOT / "examples" / folder / path for path in paths] for folder, *paths in EXAMPLES)
PARTS: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {"backends": backends},
    ROOT / "docs" / "conformance.md": {"saboteurs": saboteurs},
    ROOT / "docs" / "writing-a-backend.md": {
        "sizes": sizes,
        "plugin.py": lambda: code(BLOCK[0]),
        "block.py": lambda: code(BLOCK[1]),
        "block": lambda: fields(Block),
        "rule": lambda: fields(Rule),
        "flash3": lambda: code(FLASH3[1]),
        "gather.py": lambda: code(RING[1]),
    },
}
"""The parts of documents that are made from the code, by the name in their marks."""


def current(document: Path) -> str:
    """The text of the document with its parts made anew."""
    text = document.read_text()
    for name, part in PARTS[document].items():
        place = re.compile(rf"(<!-- {re.escape(name)}: this .*? -->\n).*?(<!-- {re.escape(name)}: end -->)", re.DOTALL)
        text, found = place.subn(functools.partial(_replaced, part()), text)
        assert found == 1, f"{document} has {found} places for {name}"
    return text


def _replaced(made: str, place: re.Match[str]) -> str:
    return f"{place[1]}\n{made}\n\n{place[2]}"


if __name__ == "__main__":
    for written_to in PARTS:
        written_to.write_text(current(written_to))
