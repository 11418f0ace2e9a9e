# SPDX-License-Identifier: Apache-2.0
"""Drives any block kernel round the ring, forward and backward."""
