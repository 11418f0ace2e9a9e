# SPDX-License-Identifier: Apache-2.0
"""Ring attention behind the attention functions and layers of other libraries; import each adapter by its module."""
