# SPDX-License-Identifier: Apache-2.0
"""The command `ringattn`: each subcommand is one module with `add(subparsers)` and `run(arguments) -> int`.

What a command needs of JAX it imports when it runs, so that help and mistakes are answered at once.
"""
