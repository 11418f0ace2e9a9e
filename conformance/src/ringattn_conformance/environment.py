# SPDX-License-Identifier: Apache-2.0
"""The versions and environment variables that a report lists."""

import os
import platform
import re
from importlib import metadata
from typing import Final

REPORTED: Final = ("jax", "jaxlib", "numpy", "ml-dtypes", "pytest", "pytest-xdist")
FAMILY: Final = "ringattn-"
PREFIXES: Final = ("RINGATTN_", "JAX_")
NAMES: Final = ("XLA_FLAGS", "XLA_PYTHON_CLIENT_PREALLOCATE")
_NAME: Final = re.compile(r"[\w.-]+")


def versions() -> dict[str, str | None]:
    """The versions of Python, of the suite's dependencies, and of every installed `ringattn-*` distribution."""
    family = {name.lower() for one in metadata.distributions() if (name := one.name).lower().startswith(FAMILY)}
    return {"python": platform.python_version()} | {name: version(name) for name in (*REPORTED, *sorted(family))}


def variables() -> dict[str, str]:
    """The environment variables that can change results."""
    counting = [name for name in sorted(os.environ) if name.startswith(PREFIXES) or name in NAMES]
    return {name: os.environ[name] for name in counting}


def required_by(distribution: str) -> dict[str, str | None]:
    """The installed version of each requirement of a distribution, without extras; `None` if it is not installed."""
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
