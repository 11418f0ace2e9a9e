# SPDX-License-Identifier: Apache-2.0
"""Device functions that kernels of several families share."""
