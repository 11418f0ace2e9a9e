# SPDX-License-Identifier: Apache-2.0
"""A replacement for `context_parallel_attention` of jax-linear-attention, without importing that library."""

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
"""Options of `ring_attention`, with the names that jax-linear-attention has for them."""


def context_parallel_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    mesh: Mesh | None = None,
    axis: str = "cp",
    batch_axis: str | tuple[str, ...] | None = None,
    strategy: Any = "ring",
    load_balance: bool = True,
    segment_ids: jax.Array | None = None,
    sliding_window: int | None = None,
    scale: float | None = None,
    implementation: str = "auto",
    sinks: jax.Array | None = None,
    block_q: int | None = None,
    **ring: Any,
) -> jax.Array:
    """Causal attention over `axis` to at most `sliding_window` keys, as jax-linear-attention computes it.

    It also takes the options of `ring_attention`. Arrays stay in contiguous order, so `load_balance`, which changes no
    result, has no effect; `layout="zigzag"` says that the arrays are in zigzag order. `implementation` names a backend.
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
