# SPDX-License-Identifier: Apache-2.0
"""The options of a call, a row for each: its array, its check, and the feature that a backend needs for it.

The axis letters of an array decide its padding, its sharding and its shape. An array is differentiable exactly if it
holds floating-point numbers. Defaults are those of the per-shard signature.
"""

import dataclasses
import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import jax
from typing_extensions import TypedDict

from ..config import BwdParams, FwdParams, RingAttentionConfig
from ..contract.call import Call, is_off
from ..contract.features import Feature
from ..contract.signature import PARAMETERS
from ..errors import InputError
from ..masks.info import MaskInfo
from ..placement import arrays, axes, layout
from ..strategies import Strategy
from . import checks
from .checks import Sizes

DEFAULTS: Final = {parameter.name: parameter.default for parameter in PARAMETERS}


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a call. `check(argument, value, sizes)` gives its canonical form, or raises `InputError`.

    A row with an `array` and no `check` is checked by its axis letters. Calls that use the option need `feature`.
    """

    name: str
    check: Callable[[str, Any, Sizes], Any] | None = None
    array: Any = None
    feature: Feature | None = None

    def canonical(self, value: Any, sizes: Sizes) -> Any:
        if self.check is not None:
            return self.check(self.name, value, sizes)
        return None if value is None else checks.array(self.name, value, self.array, sizes)


OPTIONS: Final = (
    Option("q_segment_ids", array=arrays.QueryIds, feature=Feature.SEGMENT_IDS),
    Option("kv_segment_ids", array=arrays.KeyIds),
    Option("softmax_aux", checks.sinks, arrays.Sinks, Feature.SINKS),
    Option("bias", array=arrays.Bias, feature=Feature.BIAS),
    Option("mask_builder", checks.mask_builder, feature=Feature.MASK_BUILDER),
    Option("sliding_window", checks.window, feature=Feature.SLIDING_WINDOW),
    Option("chunk_size", checks.chunk, feature=Feature.CHUNKED),
    Option("causal", checks.flag, feature=Feature.CAUSAL),
    Option("logits_soft_cap", checks.soft_cap, feature=Feature.SOFT_CAP),
    Option("softmax_scale", checks.scale),
    Option("axis_name", checks.axis_names),
    Option("fwd_params", lambda _, value, __: FwdParams.of(value)),
    Option("bwd_params", lambda _, value, __: BwdParams.of(value)),
    Option("fused_backward", checks.flag, feature=Feature.FUSED_BACKWARD),
    Option("attention_mask", array=arrays.DenseMask, feature=Feature.ATTENTION_MASK),
    Option("q_positions", checks.positions(arrays.QueryPositions), arrays.QueryPositions, Feature.POSITIONS),
    Option("kv_positions", checks.positions(arrays.KeyPositions), arrays.KeyPositions),
    Option("query_offset", checks.query_offset, arrays.QueryOffset, Feature.POSITIONS),
    Option("alibi_slopes", checks.float32_array(arrays.PerHead), arrays.PerHead, Feature.ALIBI),
    Option("dropout_prob", checks.probability, feature=Feature.DROPOUT),
    Option("dropout_seed", checks.seed, arrays.Seed),
    Option("batch_axis_name", checks.axis_names),
    Option("head_axis_name", checks.axis_names),
    Option("layout", lambda _, value, __: layout.canonical(value)),
    Option("two_way", checks.two_way, feature=Feature.TWO_WAY),
    Option("precision", checks.precision, feature=Feature.PRECISION),
    Option("return_lse", checks.flag, feature=Feature.RETURN_LSE),
    Option("strategy", checks.strategy),
)
ARRAYS: Final[dict[str, Any]] = {"query": arrays.Query, "key": arrays.Key, "value": arrays.Value} | {
    option.name: option.array for option in OPTIONS if option.array is not None
}
"""The type of every array of a call, with its axis letters, by name."""
_LAYOUTS: Final = {"zigzag": Feature.ZIGZAG, "striped": Feature.STRIPED}


def needs(call: Call) -> frozenset[Feature]:
    """The features that a backend must support to run this call, without `GRADIENTS`."""
    heads, dim = call.query.shape[2:]
    gathers = call.strategy == "all_gather"  # blocks then have the keys of all ranks, and the queries of one
    of_operands = {
        Feature.GROUPED_HEADS: call.key.shape[2] != heads,
        Feature.UNEQUAL_VALUE_DIM: call.value.shape[3] != dim,
        Feature.CROSS_LENGTHS: call.key.shape[1] != call.query.shape[1] or gathers,
    }
    found = {Feature[call.query.dtype.name.upper()], *(feature for feature, asked in of_operands.items() if asked)}
    found |= {row.feature for row in OPTIONS if row.feature is not None and not is_off(getattr(call, row.name))}
    return frozenset(found | ({_LAYOUTS[call.layout]} if call.layout in _LAYOUTS else set()))


def configured(given: dict[str, Any]) -> tuple[RingAttentionConfig, Any]:
    """Takes `cfg` and `backend` out of the keywords `given`; returns the configuration, and the backend asked for."""
    cfg, backend = given.pop("cfg", None), given.pop("backend", None)
    config = RingAttentionConfig() if cfg is None else RingAttentionConfig.of(cfg, "cfg")
    return config, config.backend_name if backend is None else backend


class TokenOptions(TypedDict, total=False):
    """Options that are arrays of tokens, batch rows or heads, and for which other libraries have no name."""

    q_segment_ids: arrays.QueryIds | None
    kv_segment_ids: arrays.KeyIds | None
    q_positions: arrays.QueryPositions | None
    kv_positions: arrays.KeyPositions | None
    query_offset: int | arrays.QueryOffset | None
    alibi_slopes: arrays.PerHead | None


class RingSettings(TypedDict, total=False):
    """Static options for which other libraries have no name."""

    axis_name: axes.AxisName
    batch_axis_name: axes.AxisName
    head_axis_name: axes.AxisName
    mesh: jax.sharding.Mesh | None
    in_specs: Any
    out_specs: Any
    layout: str
    two_way: bool
    strategy: Strategy
    mask_builder: Callable[[int, int, int, int, int], Any] | None
    chunk_size: int | None
    logits_soft_cap: float | None
    precision: Any
    fused_backward: bool
    cfg: RingAttentionConfig | dict[str, Any] | None


class AttentionSettings(RingSettings, total=False):
    """All static options, under their names in `ring_attention`."""

    causal: bool
    sliding_window: int | tuple[int | None, int | None] | None
    softmax_scale: float | None
    backend: str | Sequence[str] | None


class Options(TokenOptions, AttentionSettings, total=False):
    """The keyword arguments of `ring_attention`, except sinks and bias."""

    mask_info: MaskInfo | None
    attention_mask: arrays.DenseMask | None
    dropout_prob: float
    dropout_seed: int | arrays.Seed | None
    return_lse: bool


class CacheOptions(TypedDict, total=False):
    """The keyword arguments of a call on a cache; they mean what they mean in `ring_attention`."""

    sliding_window: int | tuple[int | None, int | None] | None
    chunk_size: int | None
    logits_soft_cap: float | None
    softmax_scale: float | None
    alibi_slopes: arrays.PerHead | None
    axis_name: axes.AxisName
    batch_axis_name: axes.AxisName
    head_axis_name: axes.AxisName
    layout: str
    precision: Any
    return_lse: bool


OTHER_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "is_causal": ("causal",),
    "segment_ids": ("q_segment_ids", "kv_segment_ids"),
    "mask": ("attention_mask",),
    "attn_mask": ("attention_mask",),
    "window": ("sliding_window",),
    "window_size": ("sliding_window",),
    "local_window_size": ("sliding_window",),
    "scale": ("softmax_scale",),
    "sm_scale": ("softmax_scale",),
    "dropout_rate": ("dropout_prob",),
    "dropout_p": ("dropout_prob",),
    "dropout_rng": ("dropout_seed",),
    "soft_cap": ("logits_soft_cap",),
    "softcap": ("logits_soft_cap",),
    "sinks": ("softmax_aux",),
    "q_position_ids": ("q_positions",),
    "kv_position_ids": ("kv_positions",),
    "fwd_params": ("cfg",),
    "bwd_params": ("cfg",),
    "cfg": ("fwd_params", "bwd_params"),
}
"""Names of other libraries, and of the other form of the call, with our names for the same argument."""


def refuse_unknown(given: Collection[str], known: Collection[str], function: str = "ring_attention") -> None:
    """Raises for an unknown keyword; the error names the right one if it can be guessed."""
    for name in given:
        if name in known:
            continue
        right = [other for other in OTHER_NAMES.get(name, ()) if other in known]
        right = right or difflib.get_close_matches(name, tuple(known), n=1)
        remedy = f"Pass {' and '.join(right)}" if right else f"Its arguments are {', '.join(known)}"
        raise InputError(name, f"is not an argument of {function}", remedy)
