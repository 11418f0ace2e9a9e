# SPDX-License-Identifier: Apache-2.0
"""Which values of the ring `jax.checkpoint` keeps, so that the backward pass does not run the ring again."""

from collections.abc import Callable
from typing import Any, Final

import jax

OUT_NAME: Final = "ringattn_out"
LSE_NAME: Final = "ringattn_lse"
"""The names, as `jax.ad_checkpoint.checkpoint_name` gives them, of the two results that the backward pass reads."""


def remat_policy(*, offload: bool = False) -> Callable[..., Any]:
    """A policy for `jax.checkpoint` that keeps the output and the log-sum-exp of every ring, and nothing else.

    A layer under `jax.checkpoint(layer, policy=remat_policy())` computes its projections again in the backward pass,
    but neither runs a kernel of the forward pass nor sends keys for it. With `offload`, both are kept in the memory of
    the host (`pinned_host`). To keep more, join it with `jax.checkpoint_policies.save_from_both_policies`.
    """
    names = [OUT_NAME, LSE_NAME]
    if not offload:
        return jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=names,
        offload_src="device",
        offload_dst="pinned_host",
    )
