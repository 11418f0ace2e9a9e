# SPDX-License-Identifier: Apache-2.0
"""What the tests of this repository share: rings, random blocks, and broken backends. A private package."""
