# SPDX-License-Identifier: Apache-2.0
"""The policy by which `jax.checkpoint` keeps the results of the ring, so that the backward pass does not rerun it."""

from collections.abc import Callable
from typing import Any, Final

import jax

from ..errors import InputError

OUT_NAME: Final = "ringattn_out"
LSE_NAME: Final = "ringattn_lse"
"""The names that `checkpoint_name` gives to the two results of the ring that the backward pass reads."""


def remat_policy(offload: bool = False) -> Callable[..., Any]:
    """A policy for `jax.checkpoint` that keeps the output and the log-sum-exp of every ring, and nothing else.

    The backward pass of `jax.checkpoint(layer, policy=remat_policy())` computes the projections of the layer again, but
    it neither runs the forward kernels again nor sends keys for them. (Only "ulysses" and `balance` exchange again.)
    With `offload`, both arrays are kept in host memory (`pinned_host`). To keep more, join two policies
    by `jax.checkpoint_policies.save_from_both_policies`.

    Args:
        offload: Keeps both arrays in host memory instead of device memory.
    """
    if not isinstance(offload, bool):
        raise InputError("offload", f"got {offload!r}", "It must be True, to the memory of the host, or False")
    names = [OUT_NAME, LSE_NAME]
    if not offload:
        return jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=names,
        offload_src="device",
        offload_dst="pinned_host",
    )
