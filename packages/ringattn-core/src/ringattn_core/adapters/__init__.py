# SPDX-License-Identifier: Apache-2.0
"""How other libraries reach ring attention by the names that they use; each adapter is imported on its own."""
