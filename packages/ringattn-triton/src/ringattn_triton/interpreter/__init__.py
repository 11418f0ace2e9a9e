# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels' own source on a CPU: the functions that Triton compiles, over NumPy arrays.

Nothing of Triton is patched and nothing is shared between launches: a kernel's code runs with other globals, in which
`triton.language` is `language` here. What it cannot show is what only a GPU has: layouts, shared memory, barriers.
"""
