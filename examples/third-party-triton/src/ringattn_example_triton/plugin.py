# SPDX-License-Identifier: Apache-2.0
"""The descriptor of this backend: its name, platforms, kernel and features."""

from ringattn_core import Backend
from ringattn_core import Feature as F

CAN = (F.GRADIENTS, F.FLOAT16, F.BFLOAT16, F.CAUSAL, F.GROUPED_HEADS, F.UNEQUAL_VALUE_DIM, F.SINKS, F.RETURN_LSE)
CAN += (F.ZIGZAG, F.STRIPED)

BACKEND = Backend(
    name="example-triton",
    api=1,
    platforms=("cuda", "rocm"),
    features=CAN,
    kernel="ringattn_example_triton.kernel:KERNEL",
    probe="ringattn_example_triton.plugin:why_not",
    largest_head=128,
    priority=-1000,  # chosen by name, or where no other backend can run the call
)


def why_not() -> str | None:
    """Why this backend cannot run here, or `None`."""
    try:
        import jax_triton  # noqa: F401  # pyright: ignore[reportMissingImports]
    except Exception as error:  # a jax-triton that does not fit this JAX fails in many ways
        return f"jax-triton does not import ({type(error).__name__}): pip install jax-triton"
    return None
