# SPDX-License-Identifier: Apache-2.0
"""What core and a backend say to each other: all that a backend may import of core's arithmetic."""
