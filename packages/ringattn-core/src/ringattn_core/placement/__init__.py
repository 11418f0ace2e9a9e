# SPDX-License-Identifier: Apache-2.0
"""Where tokens and devices are: layouts, meshes, sharding and padding."""
