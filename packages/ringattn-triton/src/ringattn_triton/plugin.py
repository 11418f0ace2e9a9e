# SPDX-License-Identifier: Apache-2.0
"""Describes the `triton` backend to core; importing this module imports no kernel."""

from typing import Final

from ringattn_core.contract.backend import Backend
from ringattn_core.contract.features import Feature

INTERPRET_VARIABLE: Final = "RINGATTN_TRITON_INTERPRET"
"""The environment variable that, set to 1, lets the kernels be interpreted on a CPU."""
_FEATURES: Final = (
    Feature.GRADIENTS,
    Feature.FLOAT32,
    Feature.FLOAT16,
    Feature.BFLOAT16,
    Feature.CAUSAL,
    Feature.SLIDING_WINDOW,
    Feature.CHUNKED,
    Feature.SEGMENT_IDS,
    Feature.POSITIONS,
    Feature.MASK_BUILDER,
    Feature.ATTENTION_MASK,
    Feature.GROUPED_HEADS,
    Feature.UNEQUAL_VALUE_DIM,
    Feature.CROSS_LENGTHS,
    Feature.SOFT_CAP,
    Feature.SINKS,
    Feature.BIAS,
    Feature.ALIBI,
    Feature.DROPOUT,
    Feature.RETURN_LSE,
    Feature.ZIGZAG,
    Feature.STRIPED,
    Feature.PRECISION,
    Feature.FUSED_BACKWARD,
    Feature.MAX_LOGITS,
    Feature.KEY_RANGE,
    Feature.SELECTED,
)

BACKEND: Final = Backend(
    name="triton",
    api=1,
    platforms=("cuda", "rocm", "gpu"),  # not "cpu": interpreted kernels are too slow for a default
    features=_FEATURES,
    kernel="ringattn_triton.block_kernel:KERNEL",
    probe="ringattn_triton.availability:why_unavailable",
    variables=(INTERPRET_VARIABLE,),
    largest_head=256,
)
