# SPDX-License-Identifier: Apache-2.0
"""A replacement for `AttentionOp.apply_attention` of MaxText, over its mesh axes, without importing MaxText."""

import math
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool
from ringattn_core import MaskInfo, from_layout, ring_attention, to_layout

from .options import checked, refuse

TYPES: Final = ("global", "mla", "local_sliding", "chunk", "full")
"""The values of MaxText's `AttentionType` that `ring_attention` can express."""
OF_THE_LAYER: Final[dict[str, str]] = dict.fromkeys(
    ("causal", "sliding_window", "chunk_size", "softmax_scale", "logits_soft_cap", "softmax_aux", "strategy", "mesh",
     "axis_name", "batch_axis_name", "head_axis_name", "layout", "q_segment_ids", "kv_segment_ids", "kv_range"),
    "the configuration of MaxText",
)  # fmt: skip


def apply_attention(
    op: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decoder_segment_ids: jax.Array | None,
    segment_positions: jax.Array | None,
    lengths: jax.Array | None,
    model_mode: str,
    use_ragged_attention: bool = False,
    previous_chunk: Any = None,
    bidirectional_mask: Any = None,
    sinks: jax.Array | None = None,
    indexer_mask: jax.Array | None = None,
    compressed_mask: jax.Array | None = None,
    record_max_logits: bool = False,
    decoder_segment_ids_kv: jax.Array | None = None,
    pad_kv_total: int = 0,
    compress_ratio: int = 0,
    *,
    qk_product_einsum: Any,
    wv_product_einsum: Any,
    **ring: Any,
) -> tuple[jax.Array, None, None]:
    """Computes `AttentionOp.apply_attention` for training and prefill, whatever `attention_kernel` says.

    Assign it to the class. Mesh axes, strategy, layout, window, chunk and soft cap come from the layer and its
    configuration; `functools.partialmethod` adds other options of `ring_attention`. Segment positions are not read:
    masks by position compare indices in the sequence, in the order of the load balancing. Both einsums are ignored.

    `bidirectional_mask` is true for the tokens of images, in the order of the other arrays. Tokens of an image, a run
    in natural order, see one another, also beyond a window, but not beyond their segment. They take 8 bytes a query.
    """
    refuse(
        {"lengths": lengths, "use_ragged_attention": use_ragged_attention, "previous_chunk": previous_chunk,
         "bidirectional_mask": bidirectional_mask if op.attention_type.value == "chunk" else None,
         "indexer_mask": indexer_mask, "compressed_mask": compressed_mask,
         "record_max_logits": record_max_logits, "decoder_segment_ids_kv": decoder_segment_ids_kv,
         "pad_kv_total": pad_kv_total, "compress_ratio": compress_ratio, "kv_quant": op.kv_quant,
         "dropout_rate": op.dropout_rate, "moba": op.config.moba,
         "model_mode": None if model_mode in ("train", "prefill") else model_mode,
         "attention_type": None if op.attention_type.value in TYPES else op.attention_type.value},
        "Use MaxText's own attention for this layer",
    )  # fmt: skip
    kind, strategy = op.attention_type.value, op.config.context_parallel_strategy
    batch, heads, length, _ = op._logical_to_mesh_axes(op.flash_axis_names_q)
    masks = {"causal": kind != "full", "chunk_size": op.chunk_attn_window_size if kind == "chunk" else None}
    window = op.sliding_window_size - 1 if kind == "local_sliding" else None
    masks |= {} if window is None else {"sliding_window": (window, 0)}
    if bidirectional_mask is not None and masks["causal"]:
        masks = {"kv_range": _around_images(op, bidirectional_mask, length or (), window)}
    out = ring_attention(
        query, key, value, sinks, q_segment_ids=decoder_segment_ids, softmax_scale=1.0,
        logits_soft_cap=op.attn_logits_soft_cap or None, mesh=op.mesh, axis_name=length or (),
        batch_axis_name=batch or (), head_axis_name=heads or (), layout=_layout(op),
        strategy="ulysses" if strategy == "usp" else strategy,
        **masks, **checked(ring, OF_THE_LAYER),
    )  # fmt: skip
    return out, None, None


def _around_images(
    op: Any, of_image: Bool[Array, "B T"], sequence_axes: str | tuple[str, ...], window: int | None
) -> tuple[jax.Array, jax.Array]:
    """The `kv_range` of a causal mask, within the window if there is one, in which images see both ways."""
    names = (sequence_axes,) if isinstance(sequence_axes, str) else sequence_axes
    layout, ranks = _layout(op), math.prod(op.mesh.shape[name] for name in names)
    natural = from_layout(of_image.astype(bool), layout, ranks)
    spans = MaskInfo.from_spans(jnp.where(natural, 0, -1), window)
    return jax.tree.map(lambda x: to_layout(x, layout, ranks, axis_name=()), spans).kv_range


def _layout(op: Any) -> str:
    """The layout in which MaxText's input pipeline orders the tokens, by its configuration."""
    config = op.config
    if not op._load_balanced_context_parallel():
        return "contiguous"
    order = config.context_parallel_reorder_strategy.value
    packed_ring = config.packing and config.context_parallel_strategy == "ring"
    automatic = "striped" if packed_ring and config.hardware.startswith("gpu") else "dual_chunk_swap"
    return automatic if order == "auto" else order
