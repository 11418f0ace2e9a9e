# SPDX-License-Identifier: Apache-2.0
"""Which versions and which variables a run depends on."""

import os
import platform
import re
from importlib import metadata
from typing import Final

REPORTED: Final = ("jax", "jaxlib", "numpy", "ml-dtypes", "pytest", "pytest-xdist")
FAMILY: Final = "ringattn-"
_NAME: Final = re.compile(r"[\w.-]+")


def versions() -> dict[str, str | None]:
    """Python, what the suite stands on, and every distribution of the family that is installed."""
    family = {name.lower() for one in metadata.distributions() if (name := one.name).lower().startswith(FAMILY)}
    return {"python": platform.python_version()} | {name: version(name) for name in (*REPORTED, *sorted(family))}


def variables() -> dict[str, str]:
    """The variables of the environment that count."""
    counting = [name for name in sorted(os.environ) if name.startswith(("RINGATTN_", "JAX_")) or name == "XLA_FLAGS"]
    return {name: os.environ[name] for name in counting}


def required_by(distribution: str) -> dict[str, str | None]:
    """The version of each distribution that another one requires, extras aside; `None` where it is not there."""
    try:
        requirements = metadata.requires(distribution) or ()
    except metadata.PackageNotFoundError:
        return {}
    names = [match[0] for line in requirements if "extra ==" not in line and (match := _NAME.match(line))]
    return {name: version(name) for name in names}


def version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None
