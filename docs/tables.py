# SPDX-License-Identifier: Apache-2.0
"""Makes the tables of the documents that follow from the code. Running this file updates the documents."""

import importlib
import inspect
import re
import sys
import tomllib
from pathlib import Path

from ringattn_core import Backend, Feature, Support

ROOT = Path(__file__).parent.parent
SABOTEURS = ROOT / "conformance" / "tests"
WORDS = {Support.FULL: "yes", Support.PLANNED: "planned", Support.IMPOSSIBLE: "impossible"}


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
        support = (backend.features.get(feature) for backend in columns)
        answers = " | ".join("no" if word is None else WORDS[word] for word in support)
        rows.append(f"| `{feature.name}` | {feature.value} | {answers} |")
    return "\n".join(rows)


def saboteurs() -> str:
    """The table of saboteurs: how each is broken, and which tests of the suite catch it."""
    sys.path.insert(0, str(SABOTEURS))
    try:
        broken = importlib.import_module("saboteurs").SABOTEURS
        partly = importlib.import_module("broken_blocks").BREAKS
    finally:
        sys.path.remove(str(SABOTEURS))
    rows = ["| saboteur | how it is broken | caught by |", "|---|---|---|"]
    for name, sabotage in broken.items():
        tests = ", ".join(f"`{test}`" for test in dict.fromkeys(short(test) for test in sabotage.caught_by))
        rows.append(f"| `{name}` | {inspect.getdoc(type(sabotage.kernel))} | {tests} |")
    rows += [f"| `{name}` | {one.fault} | {one.caught_by} |" for name, one in partly.items()]
    return "\n".join(rows)


def short(test: str) -> str:
    """The id of a test without its parameters and its folders."""
    return test.split("[")[0].rsplit("/")[-1]


TABLES = {ROOT / "README.md": ("backends", backends), ROOT / "docs" / "conformance.md": ("saboteurs", saboteurs)}


def current(document: Path) -> str:
    """The text of the document with its table made anew."""
    name, table = TABLES[document]
    place = re.compile(rf"(<!-- {name}: this .*? -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    return place.sub(lambda match: f"{match[1]}\n{table()}\n\n{match[2]}", document.read_text())


if __name__ == "__main__":
    for written in TABLES:
        written.write_text(current(written))
