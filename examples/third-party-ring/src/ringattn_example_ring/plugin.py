# SPDX-License-Identifier: Apache-2.0
"""The descriptor of this backend: its name, platforms, ring function and features."""

from ringattn_core import Backend
from ringattn_core import Feature as F

CAN = (F.GRADIENTS, F.FLOAT32, F.FLOAT16, F.BFLOAT16, F.RETURN_LSE, F.SINKS, F.ZIGZAG, F.STRIPED, F.CAUSAL)
CAN += (F.SLIDING_WINDOW, F.CHUNKED, F.SEGMENT_IDS, F.GROUPED_HEADS, F.UNEQUAL_VALUE_DIM, F.CROSS_LENGTHS)

BACKEND = Backend(
    name="example-ring",
    api=1,
    platforms=("cpu", "gpu", "cuda", "rocm", "tpu"),
    features=CAN,
    ring="ringattn_example_ring.gather:ring_attention",
    priority=-1001,  # chosen by name, or where no other backend can run the call
)
