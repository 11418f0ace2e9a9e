# SPDX-License-Identifier: Apache-2.0
"""Which options of `ring_attention` an adapter takes, under which names; the mesh, random keys and dtypes."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt32

from ..call import checks
from ..call.mesh_roles import mesh_around
from ..config import RingAttentionConfig
from ..contract.call import is_off
from ..errors import InputError, did_you_mean, in_one_line
from ..masks.builder import Builder
from ..placement import arrays
from ..placement.axes import AxisName
from ..strategies import Strategy


class RingArrays(TypedDict, total=False):
    """Options that are arrays, and for which other libraries have no name."""

    q_segment_ids: arrays.QueryIds | None
    kv_segment_ids: arrays.KeyIds | None
    q_positions: arrays.QueryPositions | None
    kv_positions: arrays.KeyPositions | None
    query_offset: int | arrays.QueryOffset | None
    alibi_slopes: arrays.PerHead | None
    softmax_aux: arrays.Sinks | arrays.SharedSinks | None


class RingSettings(TypedDict, total=False):
    """Static options for which other libraries have no name."""

    axis_name: AxisName
    batch_axis_name: AxisName
    head_axis_name: AxisName
    mesh: jax.sharding.Mesh | None
    in_specs: Any
    out_specs: Any
    layout: str
    strategy: Strategy
    mask_builder: Builder | None
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


class RingOptions(RingArrays, RingSettings, total=False):
    """Options for which other libraries have no name, for an adapter that names the rest itself."""


class AttentionOptions(RingArrays, AttentionSettings, total=False):
    """All options but bias, mask and dropout, which the calling library passes."""


def checked(given: Mapping[str, Any], kind: type, renamed: Mapping[str, str]) -> dict[str, Any]:
    """The options as a dict; raises for a name that the TypedDict `kind` does not have.

    `renamed` maps names of `ring_attention` to the adapter's names.
    """
    names = kind.__annotations__
    for name in given:
        if name in renamed:
            raise InputError(name, "has another name here", f"Pass {renamed[name]}")
        if name not in names:
            guess = did_you_mean(name, sorted({*names, *renamed.values()}))
            raise InputError(name, f"is no option of this adapter{guess}", f"Options: {', '.join(sorted(names))}")
    return dict(given)


def with_mesh(options: Mapping[str, Any], *operands: Any) -> dict[str, Any]:
    """The options, with the mesh on which `ring_attention` would run the call; it is `None` if the arrays are local."""
    return {**options, "mesh": mesh_around(options.get("mesh"), options, operands)}


@contextlib.contextmanager
def adapter_names(renamed: Mapping[str, str]) -> Iterator[None]:
    """Adds the adapter's name of an argument to an error about that argument of `ring_attention`."""
    try:
        yield
    except InputError as error:
        if error.argument in renamed:
            error.add_note(f"Here {error.argument} is called {renamed[error.argument]}.")
        raise


def drops(rate: tuple[str, Any], off: tuple[str, Any]) -> bool:
    """Whether dropout applies: the rate is above 0 and the flag `off` is False. Both are pairs of name and value."""
    given, switch = rate[1], off[1]
    # Without a rate, the switch may be anything, also traced.
    if is_off(given) or (not isinstance(given, jax.core.Tracer) and np.ndim(given) == 0 and given == 0):
        return False
    return not (switch is not None and checks.flag(*off)) and checks.probability(*rate) > 0


def seed(argument: str, key: Any, rate: float) -> UInt32[Array, ""]:
    """32 random bits of the key, typed or raw; every rank of a ring must pass the same key.

    Equal keys drop the same entries, split keys independent ones.
    """
    if key is None:
        raise InputError(argument, f"is missing with a dropout of {rate}", "Pass a jax.random.key, a new one each step")
    return drawn(argument, key, lambda key: jax.random.bits(key, (), jnp.uint32))


def drawn(argument: str, key: Any, draw: Callable[[Any], Any]) -> Any:
    """Returns `draw(key)`; raises if `key` is not a single random key."""
    try:
        return draw(key)
    except (TypeError, ValueError) as error:
        raise InputError(argument, f"is not one random key ({in_one_line(error)})", "Pass a jax.random.key") from error


def dtype_of(argument: str, dtype: Any) -> Any:
    """Returns `dtype` as it is; raises unless it is one of floating-point numbers."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise InputError(argument, f"got {dtype!r}", "It needs a dtype of floating-point numbers, such as jnp.bfloat16")
    return dtype
