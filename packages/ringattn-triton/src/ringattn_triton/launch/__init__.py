# SPDX-License-Identifier: Apache-2.0
"""Launches kernels from JAX programs: `launch`, and `compiling_for` a GPU that is not there."""

from .primitive import launch as launch
from .target import compiling_for as compiling_for
