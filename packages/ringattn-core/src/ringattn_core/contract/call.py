# SPDX-License-Identifier: Apache-2.0
"""A call in canonical form: what validation hands on, and backends receive."""

import dataclasses
from typing import Any

from ..config import BwdParams, FwdParams
from ..masks.builder import Built
from ..placement import arrays


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of the per-shard signature: arrays are JAX arrays, one spelling for everything.

    Sinks have a row for each head, a window is a pair, axis names are tuples, segment ids come in pairs or not at all.
    For `batch_axis_name` and `head_axis_name` `None` says that nobody named any, and `()` that there are none.
    """

    query: arrays.Query
    key: arrays.Key
    value: arrays.Value
    q_segment_ids: arrays.QueryIds | None
    kv_segment_ids: arrays.KeyIds | None
    softmax_aux: arrays.Sinks | None
    bias: arrays.Bias | None
    mask_builder: Built | None
    sliding_window: tuple[int | None, int | None] | None
    chunk_size: int | None
    causal: bool
    logits_soft_cap: float | None
    softmax_scale: float
    axis_name: tuple[str, ...] | None
    fwd_params: FwdParams
    bwd_params: BwdParams
    fused_backward: bool
    attention_mask: arrays.DenseMask | None
    q_positions: arrays.QueryPositions | None
    kv_positions: arrays.KeyPositions | None
    alibi_slopes: arrays.Slopes | None
    dropout_prob: float
    dropout_seed: arrays.Seed | None
    batch_axis_name: tuple[str, ...] | None
    head_axis_name: tuple[str, ...] | None
    layout: str
    two_way: bool
    precision: str | None
    return_lse: bool

    def options(self) -> dict[str, Any]:
        """The call as keyword arguments of the per-shard signature."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
