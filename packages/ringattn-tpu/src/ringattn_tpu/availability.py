# SPDX-License-Identifier: Apache-2.0
"""Whether the kernels can run in this process, and if not, why: a sentence for each reason."""

from collections.abc import Sequence
from typing import Any, Final

import jax

from .launch import INTERPRETER

OLDEST: Final = 5
"""The oldest generation of TPUs for which the tests compile the kernels."""


def why_unavailable() -> str | None:
    """Why the kernels cannot run on the devices that JAX sees here, or `None` where they can."""
    return _why(jax.local_devices())


def _why(devices: Sequence[Any]) -> str | None:
    return INTERPRETER.why_no_device(devices, ("tpu",)) or next(filter(None, map(_why_not_on, devices)), None)


def _why_not_on(device: Any) -> str | None:
    if device.platform != "tpu" or _generation(device.device_kind) >= OLDEST:
        return None
    return f"device {device.id} is a {device.device_kind}; the kernels are for TPU v5e, v5p, v6e, 7x and later"


def _generation(kind: str) -> int:
    """The generation of a TPU: the digit in `kind`, such as "TPU v5 lite" or "TPU7x". Without a digit, `OLDEST`."""
    digits = [letter for letter in kind if letter.isdigit()]
    return int(digits[0]) if digits else OLDEST
