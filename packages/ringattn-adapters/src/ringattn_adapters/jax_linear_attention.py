# SPDX-License-Identifier: Apache-2.0
"""`context_parallel_attention` of jax-linear-attention, by ringattn. This module does not import that library."""

from typing import Any, Final

import jax
from jax.sharding import Mesh
from ringattn_core import ring_attention

from .options import checked, errors_in_terms_of, refuse

RENAMED: Final = {
    "axis_name": "axis", "batch_axis_name": "batch_axis", "softmax_scale": "scale", "softmax_aux": "sinks",
    "q_segment_ids": "segment_ids", "kv_segment_ids": "segment_ids", "backend": "implementation",
    "sliding_window": "sliding_window", "strategy": "strategy", "mesh": "mesh", "causal": "nothing: it is causal",
}  # fmt: skip
"""The names that the library has for options of `ring_attention`."""


def context_parallel_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mesh: Mesh | None = None,
    axis: str = "cp",
    batch_axis: str | tuple[str, ...] | None = None,
    strategy: str = "ring",
    load_balance: bool = True,
    segment_ids: jax.Array | None = None,
    sliding_window: int | None = None,
    scale: float | None = None,
    implementation: str = "auto",
    sinks: jax.Array | None = None,
    block_q: int | None = None,
    **ring: Any,
) -> jax.Array:
    """Computes what the library's function computes: causal attention over `axis`, `sliding_window` keys at most.

    It also takes the options of `ring_attention`. Arrays stay in contiguous order, so `load_balance`, which changes no
    result, has no effect; `layout="zigzag"` says that the data is in that order. `implementation` names a backend.
    """
    refuse({"block_q": block_q}, "Leave it out, or pass cfg= with sizes of the backend")
    window = None if sliding_window is None else (sliding_window - 1, 0)
    batch = None if batch_axis == "auto" else batch_axis or ()
    with errors_in_terms_of(RENAMED):
        return ring_attention(
            q, k, v, sinks, causal=True, mesh=mesh, axis_name=axis, strategy=strategy, q_segment_ids=segment_ids,
            batch_axis_name=batch, sliding_window=window, softmax_scale=scale,
            backend=None if implementation == "auto" else implementation, **checked(ring, RENAMED),
        )  # fmt: skip
