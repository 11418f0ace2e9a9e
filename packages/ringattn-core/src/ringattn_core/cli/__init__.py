# SPDX-License-Identifier: Apache-2.0
"""The command `ringattn`: each subcommand is a function `add_X(subparsers)` that sets a `run(arguments) -> int`.

JAX is imported when a command runs, so that help and wrong arguments are answered at once. Tables and pictures need
the extra `cli` (rich and matplotlib); without it, tables are printed as text with tabs.
"""
