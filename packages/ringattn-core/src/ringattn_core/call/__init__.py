# SPDX-License-Identifier: Apache-2.0
"""Validates a user's call and runs it on a backend."""
