# SPDX-License-Identifier: Apache-2.0
"""The description of this backend that core reads; importing it imports no kernel."""

from typing import Final

from ringattn_core.contract.backend import Backend
from ringattn_core.contract.features import Feature

INTERPRET_VARIABLE: Final = "RINGATTN_TPU_INTERPRET"
"""The environment variable that, set to 1, lets the kernels be interpreted on a CPU."""
_FEATURES: Final = (
    Feature.GRADIENTS, Feature.FLOAT32, Feature.BFLOAT16, Feature.CAUSAL, Feature.SLIDING_WINDOW, Feature.CHUNKED,
    Feature.SEGMENT_IDS, Feature.KEY_RANGE, Feature.SELECTED, Feature.POSITIONS, Feature.MASK_BUILDER,
    Feature.ATTENTION_MASK, Feature.GROUPED_HEADS, Feature.UNEQUAL_VALUE_DIM, Feature.CROSS_LENGTHS, Feature.SOFT_CAP,
    Feature.SINKS, Feature.BIAS, Feature.ALIBI, Feature.DROPOUT, Feature.RETURN_LSE, Feature.ZIGZAG, Feature.STRIPED,
    Feature.PRECISION, Feature.FUSED_BACKWARD, Feature.MAX_LOGITS,
)  # fmt: skip

BACKEND: Final = Backend(
    name="tpu",
    api=1,
    platforms=("tpu",),  # interpreted on a CPU only where it is named: no default should be that slow
    features=_FEATURES,
    reasons={Feature.FLOAT16: "the compiler of TPU kernels has no float16; use bfloat16"},
    kernel="ringattn_tpu.block:KERNEL",
    probe="ringattn_tpu.availability:why_unavailable",
    variables=(INTERPRET_VARIABLE,),
    largest_head=256,
)
