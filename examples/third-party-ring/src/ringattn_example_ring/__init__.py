# SPDX-License-Identifier: Apache-2.0
"""An example of a backend that drives its own ring."""
