# SPDX-License-Identifier: Apache-2.0
"""The signature of the per-shard function, which every backend offers."""

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import jax

from ..placement import arrays


class RingAttention(Protocol):
    """Exact attention of one rank's queries to the keys of all ranks of a ring.

    `axis_name=None` means one device and no ring; a tuple of names is one ring over the product of these axes. With
    `return_lse=True` the result is `(out, lse)`. Names, order and defaults up to `fused_backward` never change.
    """

    def __call__(
        self,
        query: arrays.Query,
        key: arrays.Key,
        value: arrays.Value,
        q_segment_ids: arrays.QueryIds | None = None,
        kv_segment_ids: arrays.KeyIds | None = None,
        softmax_aux: arrays.Sinks | arrays.SharedSinks | None = None,
        bias: arrays.Bias | None = None,
        mask_builder: Callable[[int, int, int, int, int], Any] | None = None,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        chunk_size: int | None = None,
        causal: bool = False,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        axis_name: str | tuple[str, ...] | None = None,
        fwd_params: Any = None,
        bwd_params: Any = None,
        fused_backward: bool = False,
        *,
        attention_mask: arrays.DenseMask | None = None,
        q_positions: arrays.QueryPositions | None = None,
        kv_positions: arrays.KeyPositions | None = None,
        q_position_ids: arrays.QueryPositions | None = None,
        kv_position_ids: arrays.KeyPositions | None = None,
        query_offset: int | arrays.QueryOffset | None = None,
        alibi_slopes: arrays.PerHead | None = None,
        dropout_prob: float = 0.0,
        dropout_seed: int | arrays.Seed | None = None,
        batch_axis_name: str | tuple[str, ...] | None = None,
        head_axis_name: str | tuple[str, ...] | None = None,
        layout: str = "contiguous",
        two_way: bool = False,
        precision: Any = None,
        return_lse: bool = False,
        strategy: str = "ring",
    ) -> jax.Array | tuple[jax.Array, jax.Array]: ...


PARAMETERS = tuple(inspect.signature(RingAttention.__call__).parameters.values())[1:]
SIGNATURE = inspect.Signature(PARAMETERS)
OF_CORE = ("strategy",)
"""Parameters that a backend's own ring function does not get, because core acts on them before it calls a kernel."""


def mismatch(function: Callable[..., Any]) -> str | None:
    """Why `function` does not have this signature: the first name or default that differs, or `None`."""
    given = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in given.values())
    for wanted in PARAMETERS:
        if wanted.name in OF_CORE:
            continue
        have = given.get(wanted.name)
        if have is None and not takes_any:
            return f"a ring function needs the parameter {wanted.name!r}, or **options"
        if have is not None and have.default != wanted.default:
            return f"its parameter {wanted.name!r} must default to {wanted.default!r}, not to {have.default!r}"
    return None
