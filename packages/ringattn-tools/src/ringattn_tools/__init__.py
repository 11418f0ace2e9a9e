# SPDX-License-Identifier: Apache-2.0
"""The command `ringattn`, and the search of the autotuner; what a training step executes is in `ringattn-core`."""
