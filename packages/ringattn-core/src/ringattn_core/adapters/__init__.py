# SPDX-License-Identifier: Apache-2.0
"""Ring attention under the names that other libraries use; each adapter is imported by itself."""
