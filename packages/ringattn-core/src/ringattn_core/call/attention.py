# SPDX-License-Identifier: Apache-2.0
"""The call a user makes: exact attention over a sequence that is spread round a ring of devices."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

from ..backends.selection import select
from ..config import RingAttentionConfig
from ..errors import InputError, MeshError
from ..masks.info import MaskInfo
from ..placement.platforms import platform_of
from .dispatch import answer
from .sharding import sharded
from .validation import validated


def ring_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K Hv"],
    softmax_aux: Float[Array, "N n"] | Float[Array, " n"] | None = None,
    bias: Float[Array, "b n t S_global"] | None = None,
    /,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: Bool[Array, "b n T S_global"] | None = None,
    q_segment_ids: Int[Array, "B T"] | None = None,
    kv_segment_ids: Int[Array, "B S"] | None = None,
    q_positions: Int[Array, "*b T"] | None = None,
    kv_positions: Int[Array, "*b S"] | None = None,
    mask_builder: Callable[[int, int, int, int, int], Any] | None = None,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    causal: bool = False,
    logits_soft_cap: float | None = None,
    softmax_scale: float | None = None,
    alibi_slopes: Float[Array, " N"] | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | Int[Array, ""] | None = None,
    axis_name: str | Sequence[str] | None = None,
    batch_axis_name: str | Sequence[str] | None = None,
    head_axis_name: str | Sequence[str] | None = None,
    layout: str = "contiguous",
    two_way: bool = False,
    precision: Any = None,
    return_lse: bool = False,
    fused_backward: bool = False,
    backend: str | Sequence[str] | None = None,
    cfg: RingAttentionConfig | dict[str, Any] | None = None,
    mesh: jax.sharding.Mesh | None = None,
    in_specs: Any = None,
    out_specs: Any = None,
) -> Any:
    """Softmax attention, exact to the dtype in value and gradients, whatever the ring, layout and backend.

    Inside your own `jax.shard_map` pass `axis_name`, and arrays are local. With `mesh` arrays are global: the batch
    goes over the mesh axes named dp, fsdp or data, heads over tp or model, the sequence over `axis_name`; lengths
    that the ring does not divide are padded (contiguous layout). Without either it is one device.

    `causal`, `sliding_window` (both ends inclusive), `chunk_size`, segment ids, `mask_builder` and `attention_mask`
    are ANDed, on global positions. `softmax_aux` are attention sinks. `layout` says in which order the sequence is
    ("contiguous", "zigzag", "striped"); `to_layout` brings it there. With `two_way` half of the key heads travel the
    other way round, so that links are used in both directions. With `return_lse` the result is `(out, lse)`.
    """
    options: dict[str, Any] = {
        "q_segment_ids": q_segment_ids,
        "kv_segment_ids": kv_segment_ids,
        "q_positions": q_positions,
        "kv_positions": kv_positions,
        "attention_mask": attention_mask,
    }
    config = _config(cfg)
    call = validated(
        query,
        key,
        value,
        softmax_aux=softmax_aux,
        bias=bias,
        mask_builder=mask_builder,
        sliding_window=sliding_window,
        chunk_size=chunk_size,
        causal=causal,
        logits_soft_cap=logits_soft_cap,
        softmax_scale=softmax_scale,
        axis_name=axis_name,
        fwd_params=config.fwd_params,
        bwd_params=config.bwd_params,
        fused_backward=fused_backward,
        alibi_slopes=alibi_slopes,
        dropout_prob=dropout_prob,
        dropout_seed=dropout_seed,
        batch_axis_name=batch_axis_name,
        head_axis_name=head_axis_name,
        layout=layout,
        two_way=two_way,
        precision=precision,
        return_lse=return_lse,
        ranks=None if mesh is None else 1,
        **_with_mask_info(options, mask_info),
    )
    wanted = config.backend_name if backend is None else backend
    if mesh is not None:
        return sharded(call, wanted, mesh, in_specs, out_specs)
    if in_specs is not None or out_specs is not None:
        raise MeshError("in_specs and out_specs say how a mesh splits global arrays. Pass mesh= too")
    return answer(select(wanted, call.needs(), platform_of(None, (call.query, call.key, call.value))), call)


def _config(cfg: Any) -> RingAttentionConfig:
    if cfg is None:
        return RingAttentionConfig()
    if isinstance(cfg, dict):
        return RingAttentionConfig.from_dict(cfg)
    if not isinstance(cfg, RingAttentionConfig):
        raise InputError("cfg", f"got {type(cfg).__name__}", "Pass a RingAttentionConfig, or a dict of its fields")
    return cfg


def _with_mask_info(options: dict[str, Any], mask_info: MaskInfo | None) -> dict[str, Any]:
    """The options, with those that `mask_info` holds; one that both give is refused."""
    if mask_info is None:
        return options
    if not isinstance(mask_info, MaskInfo):
        raise InputError("mask_info", f"got {type(mask_info).__name__}", "Pass a ringattn_core.MaskInfo")
    merged = dict(options)
    for name, given in options.items():
        held = getattr(mask_info, name)
        if held is not None and given is not None:
            raise InputError(name, "is given twice, in mask_info and by itself", "Pass one of them")
        merged[name] = given if held is None else held
    return merged
