# SPDX-License-Identifier: Apache-2.0
"""The options of a call, a row for each: its check, and the feature that it needs.

An option has a row here, a line in the `def` of each function that takes it, and a field, all of one name. The field of
an array is in `Call`; its type has its axis letters, which decide its padding, its sharding and its shape. The field of
another option is in `Call`, `Rule` or `Placement`. Two kinds of names end in `Call.of`: `causal`, `sliding_window` and
`chunk_size` become `Call.reach` (`contract.call.REACH`), and `kv_range` becomes `kv_first` and `kv_last`.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

from ..config import BwdParams, FwdParams
from ..contract.call import DEFAULTS, Call, is_off
from ..contract.features import Feature
from ..placement import layout
from . import checks
from .checks import Sizes


@dataclasses.dataclass(frozen=True)
class Option:
    """One option of a call. `check(argument, value, sizes)` gives its canonical form, or raises `InputError`.

    Calls that use the option need `feature`. `None` needs no check where it is the option's default (`DEFAULTS`).
    """

    name: str
    check: Callable[[str, Any, Sizes], Any] = checks.array
    feature: Feature | None = None


OPTIONS: Final = (
    Option("q_segment_ids", feature=Feature.SEGMENT_IDS),
    Option("kv_segment_ids"),
    Option("softmax_aux", checks.sinks, Feature.SINKS),
    Option("bias", feature=Feature.BIAS),
    Option("mask_builder", checks.mask_builder, Feature.MASK_BUILDER),
    Option("sliding_window", checks.window, Feature.SLIDING_WINDOW),
    Option("chunk_size", checks.chunk, Feature.CHUNKED),
    Option("causal", checks.flag, Feature.CAUSAL),
    Option("logits_soft_cap", checks.soft_cap, Feature.SOFT_CAP),
    Option("softmax_scale", checks.scale),
    Option("axis_name", checks.axis_names),
    Option("fwd_params", lambda _, value, __: FwdParams.of(value)),
    Option("bwd_params", lambda _, value, __: BwdParams.of(value)),
    Option("fused_backward", checks.flag, Feature.FUSED_BACKWARD),
    Option("attention_mask", feature=Feature.ATTENTION_MASK),
    Option("selected", checks.selected, Feature.SELECTED),
    Option("selected_size", checks.selected_size),
    Option("q_positions", checks.positions, Feature.POSITIONS),
    Option("kv_positions", checks.positions),
    Option("kv_range", checks.key_range, Feature.KEY_RANGE),
    Option("query_offset", checks.query_offset, Feature.POSITIONS),
    Option("alibi_slopes", checks.float32_array, Feature.ALIBI),
    Option("dropout_prob", checks.probability, Feature.DROPOUT),
    Option("dropout_seed", checks.seed),
    Option("batch_axis_name", checks.axis_names),
    Option("head_axis_name", checks.axis_names),
    Option("layout", lambda _, value, __: layout.canonical(value)),
    Option("precision", checks.precision, Feature.PRECISION),
    Option("return_lse", checks.flag, Feature.RETURN_LSE),
    Option("strategy", checks.strategy),
    Option("max_distance", checks.promise),
    Option("balance", checks.balance),
    Option("return_max_logits", checks.flag, feature=Feature.MAX_LOGITS),
    Option("check_positions", checks.positions),
)
_LAYOUTS: Final = {"zigzag": Feature.ZIGZAG, "striped": Feature.STRIPED}


def needs(call: Call) -> frozenset[Feature]:
    """The features that a backend must support to run this call. `GRADIENTS` is never among them."""
    heads, dim = call.query.shape[2:]
    gathers = call.placement.strategy == "all_gather"  # blocks then have the keys of all ranks, and the queries of one
    of_operands = {
        Feature.GROUPED_HEADS: call.key.shape[2] != heads,
        Feature.UNEQUAL_VALUE_DIM: call.value.shape[3] != dim,
        Feature.CROSS_LENGTHS: call.key.shape[1] != call.query.shape[1] or gathers,
    }
    found = {Feature[call.query.dtype.name.upper()], *(feature for feature, asked in of_operands.items() if asked)}
    used = {name for name, x in call.options.items() if not is_off(x)}
    found |= {row.feature for row in OPTIONS if row.feature is not None and row.name in used}
    layout = call.placement.balance or call.placement.layout
    return frozenset(found | ({_LAYOUTS[layout]} if layout in _LAYOUTS else set()))


def head_sizes(call: Call) -> tuple[int, int]:
    """The size of the query heads of a call, and of its value heads."""
    return call.query.shape[3], call.value.shape[3]


def canonical(given: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """The options in `given`, each checked and in canonical form; the scale too, with its default from `sizes`."""
    checked = {option.name: option.check for option in OPTIONS}
    return {
        name: None if value is None and DEFAULTS.get(name) is None else checked[name](name, value, sizes)
        for name, value in {"softmax_scale": None, **given}.items()
    }


def options_in(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call among `variables`, the `locals()` of a function with its arguments, by name."""
    return {option.name: variables[option.name] for option in OPTIONS if option.name in variables}
