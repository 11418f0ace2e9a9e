# SPDX-License-Identifier: Apache-2.0
"""A portable Triton kernel as a backend, launched by jax-triton."""
