# SPDX-License-Identifier: Apache-2.0
"""Turns a user's call into a checked one and hands it to a backend."""
