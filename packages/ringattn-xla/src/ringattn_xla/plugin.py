# SPDX-License-Identifier: Apache-2.0
"""The description of this backend that core reads; importing it imports no kernel."""

from typing import Final

from ringattn_core.contract.backend import Backend
from ringattn_core.contract.features import Feature

_FEATURES: Final = (
    Feature.GRADIENTS, Feature.FLOAT32, Feature.FLOAT16, Feature.BFLOAT16, Feature.CAUSAL, Feature.SLIDING_WINDOW,
    Feature.CHUNKED, Feature.SEGMENT_IDS, Feature.POSITIONS, Feature.MASK_BUILDER, Feature.ATTENTION_MASK,
    Feature.GROUPED_HEADS, Feature.UNEQUAL_VALUE_DIM, Feature.CROSS_LENGTHS, Feature.SOFT_CAP, Feature.SINKS,
    Feature.BIAS, Feature.ALIBI, Feature.DROPOUT, Feature.RETURN_LSE, Feature.ZIGZAG, Feature.STRIPED,
    Feature.PRECISION, Feature.FUSED_BACKWARD, Feature.MAX_LOGITS, Feature.KEY_RANGE, Feature.SELECTED,
)  # fmt: skip

BACKEND: Final = Backend(
    name="xla",
    api=1,
    platforms=("cpu", "cuda", "rocm", "gpu", "tpu"),
    features=_FEATURES,
    kernel="ringattn_xla.block:KERNEL",
    priority=-100,  # after every backend made for the platform
)
