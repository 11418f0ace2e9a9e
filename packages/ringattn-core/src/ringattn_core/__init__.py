# SPDX-License-Identifier: Apache-2.0
"""Ring attention for JAX: the signature, the ring engine and the discovery of backends."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .call.public import *  # noqa: F403  (pyright follows it)


def __getattr__(name: str) -> Any:
    """Public names load at their first use: a program that imports many libraries pays for those that it uses.

    A module loads alone: one that asks for another while it is imported must not wait for what waits for it.
    """
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f".{name}", __name__)
    public = importlib.import_module(".call.public", __name__)
    if name.startswith("_") or name not in vars(public):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = vars(public)[name]
    return globals()[name]


def __dir__() -> list[str]:
    public = importlib.import_module(".call.public", __name__)
    return sorted({*globals(), *(name for name in vars(public) if not name.startswith("_"))})
