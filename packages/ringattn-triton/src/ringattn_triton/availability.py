# SPDX-License-Identifier: Apache-2.0
"""Says in a sentence why the kernels cannot run in this process."""

import re
from collections.abc import Sequence
from typing import Any, Final

import jax

from .launch.target import INTERPRETER

TRITON_FLOOR: Final = (3, 6)
CUDA_FLOOR: Final = 80
ROCM_ARCHITECTURES: Final = ("gfx942", "gfx950")
_GPUS: Final = ("gpu", "cuda", "rocm")
_NEEDED: Final = f"NVIDIA GPUs of compute capability 8.0 (Ampere) and later, and AMD {' and '.join(ROCM_ARCHITECTURES)}"


def why_unavailable() -> str | None:
    """Why the kernels cannot run on the devices that JAX sees in this process, or `None` if they can."""
    return _why(jax.local_devices())


def _why(devices: Sequence[Any]) -> str | None:
    gpus = [device for device in devices if device.platform in _GPUS]
    reason = INTERPRETER.why_no_device(devices, _GPUS) or _why_no_triton()
    return reason or next(filter(None, map(_why_not_on, gpus)), None)


def _why_no_triton() -> str | None:
    try:
        import triton
    except ImportError as error:
        return f"Triton is not installed or does not load ({error}). It runs on Linux: pip install 'triton>=3.6'"
    if triton_version() < TRITON_FLOOR:
        return f"Triton {triton.__version__} is too old: 3.6 or later is needed. Run pip install 'triton>=3.6'"
    return None


def _why_not_on(device: Any) -> str | None:
    architecture = str(getattr(device, "compute_capability", "")).split(":")[0]
    if architecture.startswith("gfx"):
        supported = architecture in ROCM_ARCHITECTURES
    else:
        digits = re.fullmatch(r"(\d+)\.(\d)", architecture)
        supported = digits is not None and int(digits[1] + digits[2]) >= CUDA_FLOOR
    if supported:
        return None
    named = architecture if architecture.startswith("gfx") else f"compute capability {architecture or 'unknown'}"
    return f"device {device.id} is a {device.device_kind} ({named}); the kernels are for {_NEEDED}"


def triton_version() -> tuple[int, ...]:
    """The first two numbers of the version of the installed Triton, such as `(3, 6)`."""
    import triton

    return tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:2])
