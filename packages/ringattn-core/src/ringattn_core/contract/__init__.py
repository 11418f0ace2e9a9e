# SPDX-License-Identifier: Apache-2.0
"""The interface between core and backends, and the arithmetic of core that backends may import."""
