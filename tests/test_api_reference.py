# SPDX-License-Identifier: Apache-2.0
"""Whether the API reference has an entry for every public name, and every entry says what each argument is."""

import dataclasses
import enum
import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from typing import Any

from ringattn_core import ring_attention
from ringattn_core.contract.call import Call

DOCS = Path(__file__).parent.parent / "docs"
DIRECTIVE = re.compile(r"^\.\. auto(function|class|module):: (\S+)$", re.MULTILINE)
PACKAGES = ("ringattn_core.contract", "ringattn_core.masks", "ringattn_core.tuning", "ringattn_core.errors")
LEFT_OUT = {"ringattn_core.errors.did_you_mean"}
# The fields of a call are the arguments of the function.
AS_ELSEWHERE: dict[Any, Any] = {Call: ring_attention}


def public() -> dict[str, Any]:
    """Every public function and class of core by its name: those of `ringattn_core`, of the contract and the masks."""
    modules = {"ringattn_core": importlib.import_module("ringattn_core")}
    modules |= {name: importlib.import_module(name) for name in PACKAGES}
    contract = modules["ringattn_core.contract"]
    for module in pkgutil.iter_modules(contract.__path__, "ringattn_core.contract."):
        modules[module.name] = importlib.import_module(module.name)
    found = {}
    for place, module in modules.items():
        for name, value in vars(module).items():
            if name.startswith("_") or not (inspect.isfunction(value) or inspect.isclass(value)):
                continue
            own = value.__module__ == place or (place.count(".") < 2 and value.__module__.startswith("ringattn_core"))
            if own and f"{place}.{name}" not in LEFT_OUT:
                found[f"{place}.{name}"] = value
    return found


PUBLIC = public()


def described() -> list[Any]:
    """The functions and classes that the pages of the reference describe."""
    found = []
    for kind, name in DIRECTIVE.findall("\n".join(page.read_text() for page in DOCS.glob("api-*.md"))):
        if kind == "module":
            module = importlib.import_module(name)
            found += [x for x in vars(module).values() if getattr(x, "__module__", None) == name]
        else:
            place, _, attribute = name.rpartition(".")
            found.append(getattr(importlib.import_module(place), attribute))
    return found


def unexplained(value: Any) -> list[str]:
    """The arguments of a function, or of what makes an object of a class, that its documentation does not name."""
    if isinstance(value, type) and issubclass(value, (enum.Enum, BaseException)):
        return []
    if getattr(value, "_is_protocol", False):
        methods = [x for name, x in vars(value).items() if inspect.isfunction(x) and not name.startswith("_")]
        return [name for method in methods for name in (unexplained(method) if inspect.getdoc(method) else ["..."])]
    text = inspect.getdoc(value) or ""
    if dataclasses.is_dataclass(value):
        text += attributes(value)
    if value in AS_ELSEWHERE:
        text += inspect.getdoc(AS_ELSEWHERE[value]) or ""
    names = [name for name in inspect.signature(value).parameters if name not in ("self", "args", "kwargs")]
    return [name for name in names if not re.search(rf"`[^`]*\b{name}\b[^`]*`|^ *\*{{0,2}}{name}:", text, re.MULTILINE)]


def attributes(kind: Any) -> str:
    """The names of fields with a docstring of their own, as code."""
    found = re.findall(r'^    (\w+): .*\n    """', inspect.getsource(kind), re.MULTILINE)
    return " ".join(f"`{name}`" for name in found)


def test_every_public_name_has_an_entry_and_a_docstring_that_names_its_arguments():
    entries = described()
    assert not [name for name, value in PUBLIC.items() if not any(value is entry for entry in entries)]
    assert not [name for name, value in PUBLIC.items() if not value.__doc__]
    found = {name: unexplained(value) for name, value in PUBLIC.items()}
    assert not {name: arguments for name, arguments in found.items() if arguments}


def test_the_reference_covers_all_that_a_backend_may_import():
    assert len(PUBLIC) > 90
    known = {"ring_attention", "masks.Prefix", "contract.tiles.tiles", "tuning.overlay", "errors.InputError"}
    assert {f"ringattn_core.{name}" for name in known} <= set(PUBLIC)


def test_an_argument_without_a_word_is_found():
    def function(first: int, second: int):
        """Adds `first`."""

    assert unexplained(function) == ["second"]
