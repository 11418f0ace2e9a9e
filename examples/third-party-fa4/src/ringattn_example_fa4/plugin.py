# SPDX-License-Identifier: Apache-2.0
"""The descriptor of this backend: its name, platforms, kernel and features."""

from ringattn_core import Backend
from ringattn_core import Feature as F

CAN = (
    F.GRADIENTS, F.FLOAT16, F.BFLOAT16, F.CAUSAL, F.SLIDING_WINDOW, F.CHUNKED, F.KEY_RANGE, F.SEGMENT_IDS,
    F.GROUPED_HEADS, F.CROSS_LENGTHS, F.SINKS, F.ZIGZAG, F.STRIPED,
)  # fmt: skip

BACKEND = Backend(
    name="example-fa4",
    api=1,
    platforms=("cuda", "cpu"),
    features=CAN,
    half_partials=True,
    largest_head=128,  # of Blackwell; a Hopper takes 256
    head_multiple=8,
    kernel="ringattn_example_fa4.kernel:KERNEL",
    probe="ringattn_example_fa4.kernel:why_not",
    priority=-1000,  # chosen by name, or where no other backend can run the call
)
