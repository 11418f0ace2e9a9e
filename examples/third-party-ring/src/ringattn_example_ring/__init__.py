# SPDX-License-Identifier: Apache-2.0
"""An example of a backend that owns its ring."""
