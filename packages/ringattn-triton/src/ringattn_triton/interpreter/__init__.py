# SPDX-License-Identifier: Apache-2.0
"""Interprets the kernels on a CPU, over NumPy arrays: runs the Python source that Triton compiles for a GPU.

The interpreter patches nothing in Triton, and its launches share no state: a kernel's code runs with other globals, in
which the module `language` of this package replaces `triton.language`. `gluon` simulates the shared memory and the
barriers of Gluon kernels. The interpreter does not check what the compiler refuses, such as operands of two types or
lengths that are no powers of two, nor what only a GPU has: the layouts of registers, and how much shared memory a
program may use.
"""
