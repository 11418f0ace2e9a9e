# SPDX-License-Identifier: Apache-2.0
"""The options of a call, a row for each: the type of its array, its check, and the feature that it needs.

An option has a row here, a line in the `def` of each function that takes it, and a field in `Call`, all of one name.
The axis letters of an array decide its padding, its sharding and its shape. An array is differentiable exactly if it
holds floating-point numbers.
"""

import dataclasses
import difflib
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, ParamSpec, TypeVar

from ..config import BwdParams, FwdParams
from ..contract.call import Call, is_off
from ..contract.features import Feature
from ..errors import InputError
from ..placement import arrays, layout
from . import checks
from .checks import Sizes


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
    Option("precision", checks.precision, feature=Feature.PRECISION),
    Option("return_lse", checks.flag, feature=Feature.RETURN_LSE),
    Option("strategy", checks.strategy),
    Option("max_distance", checks.window),
    Option("balance", checks.balance),
    Option("return_max_logits", checks.flag, feature=Feature.MAX_LOGITS),
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
    layout = call.balance or call.layout
    return frozenset(found | ({_LAYOUTS[layout]} if layout in _LAYOUTS else set()))


def head_sizes(call: Call) -> tuple[int, int]:
    """The size of the query heads of a call, and of its value heads."""
    return call.query.shape[3], call.value.shape[3]


def canonical(given: Mapping[str, Any], sizes: Sizes) -> dict[str, Any]:
    """The options in `given`, each checked and in canonical form; the scale too, with its default from `sizes`."""
    rows = {option.name: option for option in OPTIONS}
    return {name: rows[name].canonical(value, sizes) for name, value in {"softmax_scale": None, **given}.items()}


def options_in(variables: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a call among `variables`, the `locals()` of a function with its arguments, by name."""
    return {option.name: variables[option.name] for option in OPTIONS if option.name in variables}


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
"""Argument names of other libraries, and of per-shard or global calls, with the names that mean the same here."""


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def named(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Wraps `function` so that an unknown keyword raises `InputError`, which names the right keyword if it can."""
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        for name in kwargs:
            if name not in known:
                raise InputError(name, f"is not an argument of {function.__name__}", _remedy(name, known))
        return function(*args, **kwargs)

    return checked


def _remedy(name: str, known: Collection[str]) -> str:
    """What to do in place of passing the unknown argument `name`, as the end of an error message."""
    of_cache = "lengths" in known
    if of_cache and name in ("causal", "is_causal"):
        return "Leave it out: attention to a cache is always causal"
    right = [other for other in OTHER_NAMES.get(name, ()) if other in known]
    if not right and of_cache and name in (*(option.name for option in OPTIONS), "mask_info", "in_specs", "out_specs"):
        return "Leave it out, or call ring_attention with causal=True and query_offset=lengths - query.shape[1]"
    right = right or difflib.get_close_matches(name, known, n=1)
    return f"Pass {' and '.join(right)}" if right else f"Its arguments are {', '.join(known)}"
