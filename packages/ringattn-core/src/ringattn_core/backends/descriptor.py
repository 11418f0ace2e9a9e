# SPDX-License-Identifier: Apache-2.0
"""Whether core can use a backend's descriptor, and if not, which field is wrong."""

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from ..contract.backend import API_VERSIONS, Backend
from ..contract.features import Feature
from ..errors import BackendLoadError, BackendVersionError, RingAttnError, in_one_line

_NAME: Final = re.compile(r"\w[\w.-]*")
_PATH: Final = re.compile(r"[^\s:]+:[^\s:]+")
_WHAT: Final = "its descriptor"


def defect_of(backend: Any, name: str, distribution: str | None) -> RingAttnError | None:
    """The error for a descriptor that core cannot use under `name`, or `None`. It never raises.

    The API version is checked first, because a backend for another version may have other fields.
    """
    try:
        if isinstance(backend, Backend) and type(backend.api) is int and backend.api not in API_VERSIONS:
            return BackendVersionError(name, distribution, backend.api, API_VERSIONS)
        reason = next(_wrong_fields(backend, name), None)
    except Exception as error:  # a third party made the fields; their `repr` or iteration may raise
        reason = f"it cannot be read ({in_one_line(error)})"
    return None if reason is None else BackendLoadError(name, distribution, _WHAT, reason)


def _wrong_fields(backend: Any, name: str) -> Iterator[str]:
    if not isinstance(backend, Backend):
        yield f"expected a ringattn_core.Backend, got {_shown(backend)}"
        return
    if type(backend.api) is not int:
        yield f"api={_shown(backend.api)} must be an integer"
    if not _is_name(backend.name):
        yield f"name={_shown(backend.name)} must be a word of letters, digits, '.', '_' and '-'"
    elif backend.name != name:
        yield f"its name is {backend.name!r}, and its entry point is named {name!r}"
    for field, example, is_right in _FIELDS:
        value = getattr(backend, field)
        if not is_right(value):
            yield f"{field}={_shown(value)} must be {example}"
    for field in ("features", "reasons"):
        for feature in getattr(backend, field):
            if not isinstance(feature, Feature):
                yield f"{field} has {_shown(feature)}, which is not a member of Feature"
    for feature, reason in dict(backend.reasons).items():
        if not isinstance(reason, str):
            yield f"reasons[{feature}]={_shown(reason)} must be a string"


def _shown(value: Any) -> str:
    """The `repr` of a value, cut if it is long."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:80]}..."


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _are_names(value: Any) -> bool:
    return isinstance(value, tuple) and all(map(_is_name, value))


def _is_path(value: Any) -> bool:
    return value is None or (isinstance(value, str) and _PATH.fullmatch(value) is not None)


_PATH_EXAMPLE: Final = "an import path 'module:attribute'"
_FIELDS: Final[tuple[tuple[str, str, Callable[[Any], bool]], ...]] = (
    ("platforms", "a tuple of names such as ('cuda',)", lambda value: _are_names(value) and bool(value)),
    ("features", "a set or a tuple of members of Feature", lambda value: isinstance(value, set | frozenset | tuple)),
    ("reasons", "a mapping from Feature to strings", lambda value: isinstance(value, Mapping)),
    ("kernel", _PATH_EXAMPLE, _is_path),
    ("ring", _PATH_EXAMPLE, _is_path),
    ("probe", _PATH_EXAMPLE, _is_path),
    ("priority", "an integer", lambda value: type(value) is int),
    ("variables", "a tuple of names of environment variables", _are_names),
    ("largest_head", "a positive integer or None", lambda value: value is None or (type(value) is int and value > 0)),
    ("half_partials", "True or False", lambda value: isinstance(value, bool)),
)
"""Field, what it must be, and the check."""
