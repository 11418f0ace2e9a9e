# SPDX-License-Identifier: Apache-2.0
"""The command `ringattn`. Each subcommand has a function `add_NAME(parser)`.

It adds the arguments of the subcommand, and sets `run`, the function that carries it out.

Tables and pictures need the extra `cli` (rich and matplotlib); without it, tables are printed as text with tabs.
"""
