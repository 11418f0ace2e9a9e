# SPDX-License-Identifier: Apache-2.0
"""Runs the kernels' own source on a CPU: the functions that Triton compiles, over NumPy arrays.

It patches nothing in Triton, and launches share nothing: a kernel's code runs with other globals, in which the module
`language` of this package replaces `triton.language`. `gluon` simulates the shared memory and the barriers of Gluon
kernels. It does not check what the compiler refuses, such as operands of two types or lengths that are no powers of
two, nor what only a GPU has: the layouts of registers, and how much shared memory a program may use.
"""
