# SPDX-License-Identifier: Apache-2.0
"""The kernels, in Pallas for Mosaic."""
