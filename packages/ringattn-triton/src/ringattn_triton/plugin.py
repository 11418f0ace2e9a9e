# SPDX-License-Identifier: Apache-2.0
"""What this backend tells core about itself, without importing any kernel."""

from typing import Final

from ringattn_core.contract.backend import Backend
from ringattn_core.contract.features import Feature, Support

BACKEND: Final = Backend(
    name="triton",
    api=1,
    platforms=("cuda", "rocm", "gpu"),  # interpreted on a CPU only where it is named: no default should be that slow
    features=dict.fromkeys(Feature, Support.FULL),
    kernel="ringattn_triton.block:KERNEL",
    probe="ringattn_triton.availability:why_unavailable",
    variables=("RINGATTN_TRITON_INTERPRET",),
)
