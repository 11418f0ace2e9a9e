# SPDX-License-Identifier: Apache-2.0
"""The command `ringattn`.

The function `add_X(parser)` adds the arguments of subcommand X, and sets `run`, the function that carries it out.

Tables and pictures need the extra `cli` (rich and matplotlib); without it, tables are printed as text with tabs.
"""
