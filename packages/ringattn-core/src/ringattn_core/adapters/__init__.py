# SPDX-License-Identifier: Apache-2.0
"""Ring attention under the names that other libraries use; import each adapter by its module."""
