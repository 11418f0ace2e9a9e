# SPDX-License-Identifier: Apache-2.0
"""What a backend wheel registers under the entry point group `ringattn.backends`."""

import dataclasses
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from .features import Feature

API_VERSIONS: Final = range(1, 2)
"""The numbers of the backend API that this core supports."""


@dataclasses.dataclass(frozen=True)
class Backend:
    """The descriptor of a backend. It is inert: importing it imports no kernel and touches no device.

    `name` is what calls pass as `backend=`. `platforms` are JAX's names of the devices that the backend serves ("cpu",
    "cuda", "rocm", "tpu"; "gpu" means "cuda"). The backend supports `features`; core refuses a
    call that needs any other feature. A call that names no backend goes to the one with the highest
    `priority` among the backends that can run it.

    `kernel` (a `BlockKernel`), `ring` (a `RingKernel`) and `probe` are import paths, `"module:attribute"`. Exactly one
    of `kernel` and `ring` is given. `probe` is a function that returns why the backend cannot run here, as one
    sentence, or `None`. `api` is the backend API that the backend was written for, as a literal number. `reasons` may
    say why a feature is not supported. `variables` are the environment variables `RINGATTN_...` that the backend reads;
    core warns of one that nothing installed declares.
    `half_partials` says that the kernel rounds the results of each block to half precision if the inputs are in half
    precision: for these the conformance suite allows larger errors, and its certificate says so.
    The kernel takes query and value heads up to the size `largest_head` (`None`: of any size), whose size is a multiple
    of `head_multiple`.
    """

    name: str
    api: int
    platforms: tuple[str, ...]
    features: Collection[Feature]
    kernel: str | None = None
    ring: str | None = None
    priority: int = 0
    probe: str | None = None
    reasons: Mapping[Feature, str] = dataclasses.field(default_factory=dict)
    variables: tuple[str, ...] = ()
    half_partials: bool = False
    largest_head: int | None = None
    head_multiple: int = 1

    def __post_init__(self) -> None:
        for field, (example, is_right) in _FIELDS.items():
            value = getattr(self, field)
            if not is_right(value):
                raise ValueError(f"Backend {self.name!r}: {field} must be {example}, got {value!r}")
            if field == "api" and value not in API_VERSIONS:
                return  # core refuses this backend; another API version may have other fields
        if (self.kernel is None) == (self.ring is None):
            raise ValueError(f"Backend {self.name!r}: exactly one of {self.kernel=} and {self.ring=} must be given")

    def supports(self, feature: Feature) -> bool:
        return feature in self.features

    def misfit(self, head_size: int) -> str | None:
        """Why the kernel does not take heads of this size; `None` if it does."""
        if self.largest_head is not None and head_size > self.largest_head:
            return f"the largest is {self.largest_head}"
        return f"sizes are multiples of {self.head_multiple}" if head_size % self.head_multiple else None

    def answer(self, feature: Feature) -> str:
        """Whether the backend supports the feature, in words, with the reason if it gives one."""
        word = "supported" if self.supports(feature) else "not declared"
        return f"{word}: {self.reasons[feature]}" if feature in self.reasons else word


def _are_words(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(x, str) and re.fullmatch(r"\w[\w.-]*", x) for x in value)


def _are_features(value: Any) -> bool:
    return isinstance(value, set | frozenset | tuple) and all(isinstance(x, Feature) for x in value)


def _are_reasons(value: Any) -> bool:
    return isinstance(value, Mapping) and _are_features((*value,)) and all(isinstance(x, str) for x in value.values())


def _is_path(value: Any) -> bool:
    return value is None or (isinstance(value, str) and re.fullmatch(r"[^\s:]+:[^\s:]+", value) is not None)


def _is_count(value: Any) -> bool:
    return type(value) is int and value > 0


_INTEGER: Final = ("an integer", lambda value: type(value) is int)
_PATH: Final = ("an import path 'module:attribute'", _is_path)
_FIELDS: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    "name": ("a word of letters, digits, '.', '_' and '-'", lambda value: _are_words((value,))),
    "api": _INTEGER,
    "platforms": ("a tuple of names such as ('cuda',)", lambda value: _are_words(value) and bool(value)),
    "features": ("a set or a tuple of members of Feature", _are_features),
    "kernel": _PATH,
    "ring": _PATH,
    "priority": _INTEGER,
    "probe": _PATH,
    "reasons": ("a mapping from members of Feature to strings", _are_reasons),
    "variables": ("a tuple of names of environment variables", _are_words),
    "half_partials": ("True or False", lambda value: isinstance(value, bool)),
    "largest_head": ("a positive integer or None", lambda value: value is None or _is_count(value)),
    "head_multiple": ("a positive integer", _is_count),
}
"""For each field, what its value must be, in words, and the check, in the order of the checks."""
