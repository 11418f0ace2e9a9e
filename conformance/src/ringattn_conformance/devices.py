# SPDX-License-Identifier: Apache-2.0
"""Which devices a process of the suite has, and which of them it takes first.

Every worker of pytest-xdist sees all devices, so a ring of its own can use them all. Each worker's list begins with
another device, so calls on one device are spread over all devices. Only `own_first` imports JAX.
"""

import os
import sys
from typing import TYPE_CHECKING, Final

from . import tiers

if TYPE_CHECKING:
    import jax

COUNT_FLAG: Final = "--xla_force_host_platform_device_count"
PREALLOCATE: Final = "XLA_PYTHON_CLIENT_PREALLOCATE"
WORKER: Final = "PYTEST_XDIST_WORKER"
"""Holds `gw0`, `gw1` and so on in workers of pytest-xdist."""


def set_environment() -> None:
    """Makes eight CPU devices, and lets processes share a GPU. Does nothing if JAX is already imported.

    Keeps what the user has set: the number of CPU devices in XLA_FLAGS, and XLA_PYTHON_CLIENT_PREALLOCATE.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "jax" not in sys.modules:
        os.environ.setdefault(PREALLOCATE, "false")
        if COUNT_FLAG not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {COUNT_FLAG}={tiers.RINGS[-1]}".strip()


def own_first() -> "list[jax.Device]":
    """All devices of JAX, beginning with the one of this worker."""
    import jax

    found = jax.devices()
    first = int(os.environ.get(WORKER, "gw0").removeprefix("gw")) % len(found)
    return [*found[first:], *found[:first]]
