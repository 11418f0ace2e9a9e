# SPDX-License-Identifier: Apache-2.0
"""Which plan runs a call: the ring, an all-gather of the keys, or heads exchanged for tokens (Ulysses)."""
