# SPDX-License-Identifier: Apache-2.0
"""What this backend tells core about itself, without importing any kernel."""

from typing import Final

from ringattn_core.contract.backend import Backend
from ringattn_core.contract.features import Feature, Support

BACKEND: Final = Backend(
    name="tpu",
    api=1,
    platforms=("tpu",),  # interpreted on a CPU only where it is named: no default should be that slow
    features={**dict.fromkeys(Feature, Support.FULL), Feature.FLOAT16: Support.IMPOSSIBLE},
    reasons={Feature.FLOAT16: "the compiler of TPU kernels has no float16; use bfloat16"},
    kernel="ringattn_tpu.block:KERNEL",
    probe="ringattn_tpu.availability:why_unavailable",
    variables=("RINGATTN_TPU_INTERPRET",),
)
