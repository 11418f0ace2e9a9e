# SPDX-License-Identifier: Apache-2.0
"""A plugin lists its features by name: a feature that core adds tomorrow is one that it has not declared."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def iterates_over_features(text: str) -> list[int]:
    """The lines on which a module walks through `Feature`, and so declares features that it has never heard of."""
    names = {"Feature"}
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names |= {name.asname for name in node.names if name.name == "Feature" and name.asname}

    def is_feature(node: ast.AST) -> bool:
        if isinstance(node, ast.Starred):
            return is_feature(node.value)
        if isinstance(node, ast.Attribute):
            return node.attr in ("Feature", "__members__") and (node.attr == "Feature" or is_feature(node.value))
        return isinstance(node, ast.Name) and node.id in names

    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.For, ast.comprehension)):
            found += [node.iter.lineno] if is_feature(node.iter) else []
        elif isinstance(node, ast.Call):
            found += [node.lineno for argument in node.args if is_feature(argument)]
        elif isinstance(node, (ast.List, ast.Set, ast.Tuple)):
            found += [node.lineno for element in node.elts if isinstance(element, ast.Starred) and is_feature(element)]
        elif isinstance(node, ast.Attribute) and node.attr == "__members__" and is_feature(node):
            found.append(node.lineno)
    return found


PLUGINS = sorted(path for tree in ("packages/*/src", "examples") for path in ROOT.glob(f"{tree}/**/plugin.py"))


@pytest.mark.parametrize("path", PLUGINS, ids=lambda path: path.parent.name)
def test_a_plugin_lists_its_features_by_name(path: Path) -> None:
    assert not (lines := iterates_over_features(path.read_text())), f"{path}: lines {lines} iterate over Feature"


@pytest.mark.parametrize(
    ("text", "caught"),
    [
        ("features = dict.fromkeys(Feature, FULL)", True),
        ("features = {f: FULL for f in Feature}", True),
        ("for f in contract.Feature: ...", True),
        ("from core import Feature as F\nfeatures = [*F]", True),
        ("features = Feature.__members__", True),
        ("features = {Feature.CAUSAL: FULL, Feature['BIAS']: FULL}", False),
        ("features = dict.fromkeys((Feature.CAUSAL, Feature.BIAS), FULL)", False),
    ],
)
def test_a_plugin_that_iterates_over_features_is_caught(text: str, caught: bool) -> None:
    assert bool(iterates_over_features(text)) == caught
