# SPDX-License-Identifier: Apache-2.0
"""Ring attention for JAX: the signature, the ring engine and the discovery of backends."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .call.public import *  # noqa: F403  (pyright follows it)


def __getattr__(name: str) -> Any:
    """Loads a public name at its first use, so that `import ringattn_core` alone is cheap.

    A submodule loads without `call.public`: the module that asks for it may be part of a running import of
    `call.public`, and the import would be circular.
    """
    if not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}"):
        return importlib.import_module(f".{name}", __name__)
    public = importlib.import_module(".call.public", __name__)
    if name == "__all__":
        return [public_name for public_name in vars(public) if not public_name.startswith("_")]
    if name.startswith("_") or name not in vars(public):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = vars(public)[name]
    return globals()[name]


def __dir__() -> list[str]:
    public = importlib.import_module(".call.public", __name__)
    return sorted({*globals(), *(name for name in vars(public) if not name.startswith("_"))})
