# SPDX-License-Identifier: Apache-2.0
"""The command `ringattn`. For a subcommand X, a function `add_X(parser)` adds its arguments and its function `run`.

Tables and pictures need the extra `cli` (rich and matplotlib); without it, tables are printed as text with tabs.
"""
