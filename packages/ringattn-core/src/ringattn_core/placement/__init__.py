# SPDX-License-Identifier: Apache-2.0
"""Where tokens are among the ranks, and ranks among the devices: layouts, sharding, meshes."""
