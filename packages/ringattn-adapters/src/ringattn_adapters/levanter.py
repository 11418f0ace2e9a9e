# SPDX-License-Identifier: Apache-2.0
"""`levanter.layers.attention.dot_product_attention` over a ring. This module does not import Levanter."""

import dataclasses
from typing import Any, Final

from .haliax import RENAMED, Roles, attend, refuse_other_dtype, roles_of
from .masks import SEGMENT_IDS
from .options import checked, dropout_options, errors_in_terms_of, refuse

TRANSLATED: Final = (
    "is_causal", "causal_offset", "explicit_mask", "segment_ids", "sliding_window", "bidirectional_window",
)  # fmt: skip
"""The fields of Levanter's `AttentionMask` that `ring_attention` can express; a mask that sets any other is refused."""
OF_LEVANTER: Final = RENAMED | {
    "logits_soft_cap": "logits_soft_cap", "softmax_scale": "scaling_factor", "softmax_aux": "attn_sink",
    "dropout_prob": "dropout", "dropout_seed": "prng",
}  # fmt: skip


def dot_product_attention(
    QPos: Any,
    KPos: Any,
    Key: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    bias: Any = None,
    attention_dtype: Any = None,
    precision: Any = None,
    use_flash: bool | None = None,
    attn_backend: str | None = None,
    flash_block_size: int | None = None,
    dropout: float = 0.0,
    *,
    logits_soft_cap: float | None = None,
    scaling_factor: float | None = None,
    inference: bool = True,
    prng: Any = None,
    attn_sink: Any = None,
    **ring: Any,
) -> Any:
    """Computes Levanter's `dot_product_attention`, with an `AttentionMask` or a named array as `mask`.

    It also takes the options of `ring_attention`; set the ring's axis and mesh with `functools.partial`. Arguments
    that choose one of Levanter's kernels are refused; so is a bias with a soft cap: Levanter adds the bias before the
    cap, ringattn after it.
    """
    kernel = {"use_flash": use_flash is False, "flash_block_size": flash_block_size}
    kernel["attn_backend"] = None if attn_backend == "default" else attn_backend
    refuse(kernel, "Leave it out: it names a kernel of Levanter, and `backend` names one of the ring")
    if logits_soft_cap is not None:
        refuse({"bias": bias}, "Levanter adds a bias before it caps the scores, and a ring after; pass one of the two")
    refuse_other_dtype(attention_dtype, query)
    roles = roles_of(query, key, KPos, Key, QPos)
    options = checked(ring, OF_LEVANTER) | {"logits_soft_cap": logits_soft_cap, "softmax_scale": scaling_factor}
    options |= {} if precision is None else {"precision": precision}
    options |= dropout_options(("dropout", dropout), ("inference", inference), ("prng", prng))
    if attn_sink is not None:
        options["softmax_aux"] = roles.array("attn_sink", attn_sink, ((*roles.heads, *roles.groups),))
    if mask is not None and not hasattr(mask, "axes"):
        mask, fields = mask_options(mask, roles)
        options |= fields
    with errors_in_terms_of(OF_LEVANTER):
        return attend(roles, (query, key, value), getattr(Key, "name", Key), mask, bias, options)


def mask_options(mask: Any, roles: Roles) -> tuple[Any, dict[str, Any]]:
    """The dense part of a Levanter `AttentionMask`, and the options of `ring_attention` for its other fields."""
    fields = {field.name: getattr(mask, field.name) for field in dataclasses.fields(mask)}
    refuse({name: x for name, x in fields.items() if name not in TRANSLATED}, "Pass a dense mask, a named array")
    causal, offset, dense, ids, behind, around = (fields[name] for name in TRANSLATED)
    options: dict[str, Any] = {"causal": causal}
    if behind is not None or around is not None:
        left = min(width for width in (around, None if behind is None else behind - 1) if width is not None)
        options["sliding_window"] = (left, around if behind is None else 0)
    if causal and offset is not None:
        refuse({"causal_offset": offset} if "sliding_window" in options else {}, "Beside a window pass a dense mask")
        options["query_offset"] = roles.rows("causal_offset", offset)
    for name, position, x in zip(SEGMENT_IDS, (roles.queries, roles.keys), ids or (), strict=bool(ids)):
        # Levanter gives the ids of keys the name of the query's axis.
        named = roles._replace(sizes=roles.sizes | {roles.queries: roles.sizes[position]})
        options[name] = named.rows("segment_ids", x, (roles.queries,))
    return dense, options
