# SPDX-License-Identifier: Apache-2.0
"""No loop of a kernel has a variable that Triton takes for a constant though it changes: interpreted, it is right.

Triton carries a variable from step to step if the end of the body gives it another value than it has before the loop.
After `x = y`, a loop with `x = y` in its body gives `x` the value that `y` had before, so `x` is not carried.
"""

import ast
import pathlib
from collections.abc import Iterator

import pytest
import ringattn_triton

FILES = sorted(pathlib.Path(ringattn_triton.__file__).parent.rglob("*.py"))
FAULT = """
tile = ahead
{between}
for step in range(0, count):
    last = tile
    tile = ahead
    ahead = tile_at(step)
"""


def copies(statement: ast.stmt) -> set[tuple[str, str]]:
    """The pairs of names `x = y` that a statement assigns, in its body too."""
    return {
        (node.targets[0].id, node.value.id)
        for node in ast.walk(statement)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and isinstance(node.value, ast.Name)
    }


def assigned(statement: ast.stmt) -> set[str]:
    return {x.id for x in ast.walk(statement) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store)}


def faults(source: str) -> Iterator[str]:
    """The copies that a loop repeats, each with the line of its loop."""
    for parent in ast.walk(ast.parse(source)):
        for block in (getattr(parent, name, None) for name in ("body", "orelse")):
            alike: set[tuple[str, str]] = set()
            for statement in block if isinstance(block, list) else ():
                if isinstance(statement, ast.For | ast.While):
                    for x, y in alike & copies(statement):
                        yield f"{x} = {y} before and in the loop of line {statement.lineno}"
                changed = assigned(statement)
                alike = {pair for pair in alike if not changed & {*pair}}
                if isinstance(statement, ast.Assign):
                    alike |= copies(statement)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_variable_of_a_loop_begins_as_what_its_body_makes_of_it(file: pathlib.Path) -> None:
    assert not list(faults(file.read_text()))


def test_such_a_variable_is_seen() -> None:
    assert list(faults(FAULT.format(between=""))) == ["tile = ahead before and in the loop of line 4"]
    assert not list(faults(FAULT.format(between="ahead = tile_at(0)")))
