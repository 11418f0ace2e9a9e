# SPDX-License-Identifier: Apache-2.0
"""A call in canonical form: validation makes it, and backends read it."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp

from ..masks import Interval, Reach
from ..masks.builder import Built
from ..placement import arrays
from .expansion import Expansion
from .rule import Rule


@dataclasses.dataclass(frozen=True)
class Placement:
    """Which mesh axes split the arrays of a call, in which order its tokens are, and how ranks share them.

    No kernel sees it. The fields are the arguments of `ring_attention` with the same names. For `batch_axis_name` and
    `head_axis_name`, `None` means not given, and `()` that no mesh axis splits the axis. With `balance` and layout
    "zigzag", shards are folded (`Shards.folded`). `max_distance` bounds indices in the sequence, not positions.
    """

    axis_name: tuple[str, ...] | None = None
    batch_axis_name: tuple[str, ...] | None = None
    head_axis_name: tuple[str, ...] | None = None
    layout: str = "contiguous"
    balance: str | None = None
    strategy: str = "ring"
    max_distance: Reach = Reach()

    @property
    def roles(self) -> arrays.Roles:
        """The mesh axes that split the batch, the sequence and the heads; no axis where none is given."""
        return arrays.Roles(self.batch_axis_name or (), self.axis_name or (), self.head_axis_name or ())


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of the per-shard signature. Arrays are JAX arrays, and every option has only one form.

    A pytree of its arrays. An array is differentiable exactly if it holds floating-point numbers.

    The arrays are the arguments of `ring_attention` with the same names; `kv_first` and `kv_last` are the two of
    `kv_range`, `[b, n, T]`. `selected_size` is 1 without `selected`. Sinks have a row for each head, and
    segment ids come in pairs or not at all. `rule`, `reach` and `placement` hold all other options, and `mask_builder`
    the masks that the caller's function made.

    `wide`, which is no argument, names arrays that were converted to float32 so that their gradients are summed in
    float32. Kernels get these arrays in the dtype of the queries (`narrowed`). `check` is what `RINGATTN_CHECK=1` does
    with the call of each rank: it returns the same call, without `check` and `check_positions`.

    With `expand`, the arrays in `latents` travel, and a rank computes keys and values from them on arrival. `key` and
    `value` then serve for their shapes only, and under `jax.jit` XLA does not compute them.
    """

    query: arrays.Query
    key: arrays.Key
    value: arrays.Value
    rule: Rule
    reach: Reach = Reach()
    placement: Placement = Placement()
    q_segment_ids: arrays.QueryIds | None = None
    kv_segment_ids: arrays.KeyIds | None = None
    q_positions: arrays.QueryPositions | None = None
    kv_positions: arrays.KeyPositions | None = None
    query_offset: arrays.QueryOffset | None = None
    kv_first: arrays.KeyRange | None = None
    kv_last: arrays.KeyRange | None = None
    mask_builder: Built | None = None
    attention_mask: arrays.DenseMask | None = None
    selected: arrays.Selected | None = None
    selected_size: int = 1
    bias: arrays.Bias | None = None
    alibi_slopes: arrays.PerHead | None = None
    softmax_aux: arrays.Sinks | None = None
    dropout_seed: arrays.Seed | None = None
    return_lse: bool = False
    wide: tuple[str, ...] = ()
    check_positions: arrays.QueryPositions | None = None
    check: Callable[["Call"], "Call"] | None = None
    expand: Expansion | None = None
    latents: list[jax.Array] | None = None
    expand_params: list[jax.Array] | None = None

    @classmethod
    def of(cls, query: jax.Array, key: jax.Array, value: jax.Array, options: Mapping[str, Any]) -> "Call":
        """The call with these options, by the names of `ring_attention` and in canonical form."""
        given = dict(options)
        causal, window, chunk = (given.pop(name, default) for name, default in REACH.items())
        left, right = window or (None, None)
        first, last = given.pop("kv_range", None) or (None, None)
        rule, placement = Rule(**_popped(given, Rule)), Placement(**_popped(given, Placement))
        reach = Reach(causal, left, right, chunk)
        return cls(query, key, value, rule, reach, placement, kv_first=first, kv_last=last, **given)

    @property
    def options(self) -> dict[str, Any]:
        """The options of the call by the names of `ring_attention`: what `of` takes."""
        window = (self.reach.left, self.reach.right)
        reach = (self.reach.causal, None if window == (None, None) else window, self.reach.chunk)
        kv_range = None if self.kv_first is None else (self.kv_first, self.kv_last)
        own = {name: getattr(self, name) for name in _OWN_OPTIONS}
        given = dict(zip(REACH, reach, strict=True)) | {"kv_range": kv_range}
        return own | vars(self.rule) | vars(self.placement) | given

    def placed(self, **fields: Any) -> "Call":
        """The call with these fields of its placement."""
        return dataclasses.replace(self, placement=dataclasses.replace(self.placement, **fields))

    def ruled(self, **fields: Any) -> "Call":
        """The call with these fields of its rule."""
        return dataclasses.replace(self, rule=dataclasses.replace(self.rule, **fields))

    def widened(self, **arrays: jax.Array) -> "Call":
        """The call with these float32 `arrays`, whose gradients are float32 too.

        `wide` gains the names of the arrays that were narrower before.
        """
        dtype = self.query.dtype
        wide = {name for name in arrays if dtype != jnp.float32 and getattr(self, name).dtype == dtype}
        return dataclasses.replace(self, **arrays, wide=tuple(sorted({*self.wide, *wide})))

    def narrowed(self) -> "Call":
        """The call as kernels read it: arrays named in `wide` are converted back to the dtype of the queries.

        The parameters of `expand` get the caller's dtypes again.
        """
        found: dict[str, Any] = {name: getattr(self, name).astype(self.query.dtype) for name in self.wide}
        if self.expand is not None:
            found["expand_params"] = self.expand.narrowed(self.expand_params)
        return dataclasses.replace(self, **found)

    def selected_by(self, copies: int) -> Any:
        """`selected` for keys with each head repeated `copies` times: ids of a key head are those of its copies too."""
        ids = self.selected
        if ids is None or ids.shape[2] == 1 or ids.shape[2] != self.key.shape[2]:
            return ids
        return jnp.repeat(ids, copies, 2)

    def with_shared_gradients(self) -> "Call":
        """The call with a float32 bias if several ranks share the bias, so that they add up its gradient in float32.

        Ranks share the bias if it has length 1 along an axis that mesh axes split. (They may share sinks and slopes
        too, but these are float32 in every call.)
        """
        if self.bias is None:
            return self
        roles, named = self.placement.roles, zip(arrays.letters(arrays.Bias), self.bias.shape, strict=True)
        if not any(size == 1 and arrays.broadcasts(letter) and roles.of(letter) for letter, size in named):
            return self
        return self.widened(bias=self.bias.astype(jnp.float32))

    @property
    def travelling(self) -> Any:
        """Keys and values, or the arrays from which `expand` computes them; a rank sends these round the ring."""
        return (self.key, self.value) if self.expand is None else self.latents

    def expanded(self) -> "Call":
        """The call with keys and values in place of the arrays from which `expand` computes them."""
        if self.expand is None:
            return self
        key, value = self.expand(self.latents, self.expand.narrowed(self.expand_params))
        return dataclasses.replace(self, key=key, value=value, expand=None, latents=None, expand_params=None)

    @property
    def arrays(self) -> dict[str, Any]:
        """The arrays that the call has, by name."""
        return {name: x for name in ARRAYS if (x := getattr(self, name)) is not None}

    @property
    def results(self) -> dict[str, Any]:
        """The array types of the results that the caller asks for, by name and in order."""
        asked = {"lse": self.return_lse, "max_logits": self.rule.return_max_logits}
        kinds = {"lse": arrays.LogSumExp, "max_logits": arrays.PerHead}
        return {"out": arrays.Output} | {name: kind for name, kind in kinds.items() if asked[name]}

    @property
    def built(self) -> Built:
        """The masks that the `mask_builder` made for each head; none without a builder."""
        return self.mask_builder or Built((), ())

    @property
    def kv_range(self) -> Interval:
        """The caller's own bounds of the key positions that each query sees."""
        return Interval(self.kv_first, self.kv_last)

    @property
    def natural(self) -> bool:
        """Whether positions are indices in the sequence, both of queries and of keys."""
        return self.q_positions is None and self.kv_positions is None and self.query_offset is None

    @property
    def reach_of_hops(self) -> Reach:
        """The reach by which a ring leaves out hops and rows of keys; it bounds indices in the sequence.

        Positions of the caller's own, or with a `query_offset`, say nothing about indices; `max_distance` is then the
        only bound.
        """
        promised = self.placement.max_distance
        return promised & self.reach & self.built.reach if self.natural else promised


def _popped(options: dict[str, Any], kind: type) -> dict[str, Any]:
    """Takes the options that are fields of a dataclass out of `options`."""
    return {field.name: options.pop(field.name) for field in dataclasses.fields(kind) if field.name in options}


def is_off(option: Any) -> bool:
    """Whether `option`, a value in a call, says that the call does not use it: `None`, `False` or 0.0."""
    return option is None or (isinstance(option, bool | float) and not option)


ARRAYS: Final = arrays.types_of(Call)
"""The type of every array of a call, with its axis letters, by name. (`latents` and `expand_params` are lists.)"""
REACH: Final[Mapping[str, Any]] = {"causal": False, "sliding_window": None, "chunk_size": None}
"""The options that `Call.reach` holds, with their defaults: `sliding_window` as `left` and `right`, `chunk_size` as
`chunk`."""
_OWN_OPTIONS: Final = (
    *(name for name in ARRAYS if name not in ("query", "key", "value", "kv_first", "kv_last")),
    "mask_builder",
    "selected_size",
    "return_lse",
)
DEFAULTS: Final[Mapping[str, Any]] = {
    field.name: field.default for kind in (Call, Rule, Placement) for field in dataclasses.fields(kind)
} | REACH
"""The default of every option in a canonical call."""
_DATA = [*ARRAYS, "latents", "expand_params"]
_STATIC = [field.name for field in dataclasses.fields(Call) if field.name not in _DATA]
jax.tree_util.register_dataclass(Call, data_fields=_DATA, meta_fields=_STATIC)
