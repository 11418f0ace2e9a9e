# SPDX-License-Identifier: Apache-2.0
"""The descriptor of this backend: its name, platforms, kernel and features."""

from ringattn_core import Backend
from ringattn_core import Feature as F

CAN = (
    F.GRADIENTS, F.FLOAT16, F.BFLOAT16, F.CAUSAL, F.SLIDING_WINDOW, F.CHUNKED, F.KEY_RANGE, F.SEGMENT_IDS,
    F.GROUPED_HEADS, F.CROSS_LENGTHS, F.UNEQUAL_VALUE_DIM, F.RETURN_LSE, F.SINKS, F.ZIGZAG, F.STRIPED,
)  # fmt: skip

BACKEND = Backend(
    name="example-tokamax",
    api=1,
    platforms=("cuda",),
    features=CAN,
    half_partials=True,
    largest_head=128,
    kernel="ringattn_example_tokamax.kernel:KERNEL",
    probe="ringattn_example_tokamax.kernel:why_not",
    priority=-1000,  # chosen by name, or where no other backend can run the call
)
