# SPDX-License-Identifier: Apache-2.0
"""A replacement for `RingAttn.forward_native` of EasyDeL. EasyDeL is imported only when the function runs."""

from typing import Any, Final

import jax
from ringattn_core import ring_attention

from .masks import with_masks
from .options import refuse

HINTS: Final = ("deterministic", "dropout_rng", "prevent_cse", "policy", "cache_metadata")
"""Arguments that EasyDeL passes to every operation. Ignored: without dropout or a cache they change no result."""


def forward_native(
    operation: Any,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    softmax_aux: jax.Array | None = None,
    mask_info: Any = None,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    sliding_window: int | tuple[int, int] | None = None,
    causal: bool = True,
    fused_backward: bool = False,
    *,
    bias: jax.Array | None = None,
    precision: Any = None,
    normalize_output: bool = True,
    **others: Any,
) -> Any:
    """Computes `RingAttn.forward_native` for training, over the mesh axes that the operation's metadata names.

    Assign it to the class: models with `attn_mechanism="ring"` then call it. EasyDeL's own function turns a dense mask
    into segment ids and ignores unknown arguments; here the mask stays dense, and unknown arguments are refused.
    """
    from easydel.operations import AttentionOutput  # pyright: ignore[reportMissingImports]

    refuse(
        {name: x for name, x in others.items() if name not in HINTS} | {"normalize_output": not normalize_output},
        "Use another attn_mechanism of EasyDeL",
    )
    meta = operation.metadata
    rules = meta.get_shardings(
        mode=operation.get_mode(query=query, BTHD=False), layout="bthd", qkv_mni_sharding=True, softmax_aux=softmax_aux
    )
    spec = operation.create_stable_sharding(rules.query, dep=query, tensor=query, preserved_indices=[0, 1, 2])
    batch, _, heads, _ = spec
    query, key, value = (x.astype(meta.runtime_dtype) for x in (query, key, value))
    options = {} if mask_info is None else _arrays_of(mask_info)
    mask = options.pop("attention_mask", None)
    out = ring_attention(
        query, key, value, None if softmax_aux is None else softmax_aux.reshape(-1), causal=causal,
        logits_soft_cap=logits_soft_cap, softmax_scale=softmax_scale, sliding_window=sliding_window,
        fused_backward=fused_backward, precision=precision, mesh=meta.mesh, axis_name=meta.sequence_axis_name,
        batch_axis_name=batch or (), head_axis_name=heads or (), **with_masks(options, query, key, bias, mask),
    )  # fmt: skip
    return AttentionOutput(attention_weights=None, attention_outputs=out)


def _arrays_of(mask_info: Any) -> dict[str, Any]:
    """The arrays that an ejkernel `MaskInfo` was made of. (Its properties would turn a dense mask into segment ids.)"""
    mask = mask_info._attention_mask
    options = {"attention_mask": None if mask is None else mask.astype(bool)}
    options |= {"q_segment_ids": mask_info._q_segment_ids, "kv_segment_ids": mask_info._kv_segment_ids}
    options |= {"q_positions": mask_info.q_positions, "kv_positions": mask_info.kv_positions}
    if all(x is None for x in options.values()):
        refuse({"cu_seqlens_q": mask_info._cu_seqlens_q}, "Make the MaskInfo from segment ids")
    return options
