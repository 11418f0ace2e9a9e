# SPDX-License-Identifier: Apache-2.0
"""The per-shard signature: of the function that every backend's package offers, and of a `RingKernel`."""

import inspect
from collections.abc import Callable
from typing import Any, Final, Protocol

import jax

from ..masks.builder import Builder
from ..placement import arrays
from ..placement.axes import AxisName


class RingKernel(Protocol):
    """Exact attention of one rank's queries to the keys of all ranks of a ring.

    A backend may bring such a function in place of a `BlockKernel`: it then drives the ring itself. Core passes
    every argument by keyword, and every value has the one form that `Call` describes. The function of `per_shard` takes
    these arguments too, in every form that `ring_attention` takes, and the options that only core can act on.

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
        mask_builder: Builder | None = None,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        chunk_size: int | None = None,
        causal: bool = False,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        axis_name: AxisName = None,
        fwd_params: Any = None,
        bwd_params: Any = None,
        fused_backward: bool = False,
        *,
        attention_mask: arrays.DenseMask | None = None,
        q_positions: arrays.QueryPositions | None = None,
        kv_positions: arrays.KeyPositions | None = None,
        query_offset: int | arrays.QueryOffset | None = None,
        alibi_slopes: arrays.PerHead | None = None,
        dropout_prob: float = 0.0,
        dropout_seed: int | arrays.Seed | None = None,
        batch_axis_name: AxisName = None,
        head_axis_name: AxisName = None,
        layout: str = "contiguous",
        precision: str | jax.lax.Precision | None = None,
        return_lse: bool = False,
    ) -> Any: ...


PARAMETERS: Final = tuple(inspect.signature(RingKernel.__call__).parameters.values())[1:]
"""The parameters of a backend's own ring function."""


def mismatch(function: Callable[..., Any]) -> str | None:
    """The first parameter of `RingKernel` that `function` lacks, or has with another default, in words, or `None`."""
    given = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in given.values())
    for wanted in PARAMETERS:
        have = given.get(wanted.name)
        if have is None and not takes_any:
            return f"a ring function needs the parameter {wanted.name!r}, or **options"
        if have is not None and have.default != wanted.default:
            return f"its parameter {wanted.name!r} must default to {wanted.default!r}, not to {have.default!r}"
    return None
