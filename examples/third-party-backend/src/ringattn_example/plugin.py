# SPDX-License-Identifier: Apache-2.0
"""The descriptor of this backend: its name, platforms, kernel and features."""

from ringattn_core import Backend
from ringattn_core import Feature as F

CAN = (F.GRADIENTS, F.FLOAT32, F.FLOAT16, F.BFLOAT16, F.RETURN_LSE, F.SINKS, F.ZIGZAG, F.STRIPED, F.CAUSAL)
CAN += (F.SLIDING_WINDOW, F.CHUNKED, F.KEY_RANGE, F.SEGMENT_IDS, F.POSITIONS, F.MASK_BUILDER, F.ATTENTION_MASK)
CAN += (F.GROUPED_HEADS, F.UNEQUAL_VALUE_DIM, F.CROSS_LENGTHS)

BACKEND = Backend(
    name="example",
    api=1,
    platforms=("cpu", "gpu", "cuda", "rocm", "tpu"),
    features=CAN,
    kernel="ringattn_example.block:KERNEL",
    priority=-1000,  # chosen by name, or where no other backend can run the call
)
