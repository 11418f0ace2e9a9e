# SPDX-License-Identifier: Apache-2.0
"""Launches kernels from JAX programs (`launch`), or compiles them for a GPU that may be absent (`compiling_for`)."""

from .primitive import launch as launch
from .target import compiling_for as compiling_for
