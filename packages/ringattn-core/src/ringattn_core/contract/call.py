# SPDX-License-Identifier: Apache-2.0
"""A call in canonical form: what validation hands on, and backends receive."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from ..config import BwdParams, FwdParams
from .features import Feature


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of the per-shard signature: arrays are JAX arrays, one spelling for everything.

    Sinks are `[N, n]`, a window is a pair, axis names are tuples, segment ids come in pairs or not at all.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    q_segment_ids: jax.Array | None
    kv_segment_ids: jax.Array | None
    softmax_aux: jax.Array | None
    bias: jax.Array | None
    mask_builder: Callable[..., Any] | None
    sliding_window: tuple[int | None, int | None] | None
    chunk_size: int | None
    causal: bool
    logits_soft_cap: float | None
    softmax_scale: float
    axis_name: tuple[str, ...] | None
    fwd_params: FwdParams
    bwd_params: BwdParams
    fused_backward: bool
    attention_mask: jax.Array | None
    q_positions: jax.Array | None
    kv_positions: jax.Array | None
    alibi_slopes: jax.Array | None
    dropout_prob: float
    dropout_seed: jax.Array | None
    batch_axis_name: tuple[str, ...] | None
    head_axis_name: tuple[str, ...] | None
    layout: str
    two_way: bool
    precision: str | None
    return_lse: bool

    def options(self) -> dict[str, Any]:
        """The call as keyword arguments of the per-shard signature."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def needs(self) -> frozenset[Feature]:
        """What a backend must support to answer this call, gradients aside."""
        _, q_length, heads, dim = self.query.shape
        asked = {
            Feature.CAUSAL: self.causal,
            Feature.SLIDING_WINDOW: self.sliding_window is not None,
            Feature.CHUNKED: self.chunk_size is not None,
            Feature.SEGMENT_IDS: self.q_segment_ids is not None,
            Feature.POSITIONS: self.q_positions is not None,
            Feature.MASK_BUILDER: self.mask_builder is not None,
            Feature.ATTENTION_MASK: self.attention_mask is not None,
            Feature.GROUPED_HEADS: self.key.shape[2] != heads,
            Feature.UNEQUAL_VALUE_DIM: self.value.shape[3] != dim,
            Feature.CROSS_LENGTHS: self.key.shape[1] != q_length,
            Feature.SOFT_CAP: self.logits_soft_cap is not None,
            Feature.SINKS: self.softmax_aux is not None,
            Feature.BIAS: self.bias is not None,
            Feature.ALIBI: self.alibi_slopes is not None,
            Feature.DROPOUT: self.dropout_prob > 0,
            Feature.RETURN_LSE: self.return_lse,
            Feature.ZIGZAG: self.layout == "zigzag",
            Feature.STRIPED: self.layout == "striped",
            Feature.TWO_WAY: self.two_way,
            Feature.PRECISION: self.precision is not None,
            Feature.FUSED_BACKWARD: self.fused_backward,
        }
        dtype = Feature[self.query.dtype.name.upper()]
        return frozenset({dtype, *(feature for feature, wanted in asked.items() if wanted)})
