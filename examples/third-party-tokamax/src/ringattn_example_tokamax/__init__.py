# SPDX-License-Identifier: Apache-2.0
"""tokamax's attention for Hopper and Blackwell as a backend."""
