# SPDX-License-Identifier: Apache-2.0
"""Which options of `ring_attention` an adapter takes under their own names, and what it calls the others."""

import contextlib
import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypedDict

import jax
from jaxtyping import Array, Float, Int

from ..config import RingAttentionConfig
from ..errors import InputError


class RingArrays(TypedDict, total=False):
    """Arrays that belong to one call and that other libraries have no name for."""

    q_segment_ids: Int[Array, "B T"] | None
    kv_segment_ids: Int[Array, "B S"] | None
    q_positions: Int[Array, "*b T"] | None
    kv_positions: Int[Array, "*b S"] | None
    softmax_aux: Float[Array, "N n"] | Float[Array, " n"] | None
    alibi_slopes: Float[Array, " N"] | None


class RingSettings(TypedDict, total=False):
    """Options that are no arrays and that other libraries have no name for."""

    axis_name: str | Sequence[str] | None
    batch_axis_name: str | Sequence[str] | None
    head_axis_name: str | Sequence[str] | None
    mesh: jax.sharding.Mesh | None
    in_specs: Any
    out_specs: Any
    layout: str
    two_way: bool
    mask_builder: Callable[[int, int, int, int, int], Any] | None
    chunk_size: int | None
    logits_soft_cap: float | None
    precision: Any
    fused_backward: bool
    cfg: RingAttentionConfig | dict[str, Any] | None


class RingOptions(RingArrays, RingSettings, total=False):
    """Both kinds, for a function that has its own names for the rest."""


class AttentionSettings(RingSettings, total=False):
    """All options that are no arrays, by the names of `ring_attention`."""

    causal: bool
    sliding_window: int | tuple[int | None, int | None] | None
    softmax_scale: float | None
    backend: str | Sequence[str] | None


class AttentionOptions(RingArrays, AttentionSettings, total=False):
    """Every option that the calling library does not pass itself; it passes bias, mask and dropout."""


def checked(given: Mapping[str, Any], kind: type, renamed: Mapping[str, str]) -> dict[str, Any]:
    """The options given; refuses a name that the TypedDict `kind` lacks.

    `renamed` gives the adapter's name for options of `ring_attention` that it calls otherwise.
    """
    names = kind.__annotations__
    for name in given:
        if name in renamed:
            raise InputError(name, "has another name here", f"Pass {renamed[name]}")
        if name not in names:
            close = difflib.get_close_matches(name, sorted({*names, *renamed.values()}), n=1)
            guess = f" (did you mean {close[0]}?)" if close else ""
            raise InputError(name, f"is no option of this adapter{guess}", f"Options: {', '.join(sorted(names))}")
    return dict(given)


@contextlib.contextmanager
def told_in_words_of(renamed: Mapping[str, str]) -> Iterator[None]:
    """Adds to an error about an argument of `ring_attention` what the adapter calls that argument."""
    try:
        yield
    except InputError as error:
        if error.argument in renamed:
            error.add_note(f"Here {error.argument} is called {renamed[error.argument]}.")
        raise
