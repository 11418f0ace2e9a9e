# SPDX-License-Identifier: Apache-2.0
"""The backend for GPUs: ring attention with Triton kernels."""

from ringattn_core import per_shard

ring_attention = per_shard("triton")
