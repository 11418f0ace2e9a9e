# SPDX-License-Identifier: Apache-2.0
"""What this backend tells core about itself, without importing any kernel."""

from typing import Final

from ringattn_core.contract.backend import Backend
from ringattn_core.contract.features import Feature, Support

BACKEND: Final = Backend(
    name="xla",
    api=1,
    platforms=("cpu", "cuda", "rocm", "gpu", "tpu"),
    features=dict.fromkeys(Feature, Support.FULL),
    kernel="ringattn_xla.block:KERNEL",
    priority=-100,  # what runs everywhere comes after whatever was made for the platform
)
