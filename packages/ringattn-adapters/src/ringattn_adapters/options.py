# SPDX-License-Identifier: Apache-2.0
"""Checks the arguments of an adapter: options of `ring_attention`, and arguments of the library that it adapts."""

import contextlib
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32
from ringattn_core import ring_attention
from ringattn_core.errors import InputError, did_you_mean, in_one_line

PASSED: Final = ("query", "key", "value", "bias", "mask_info", "return_lse")
"""The arguments of `ring_attention` that no adapter takes as an option: it sets or leaves them out itself."""
OPTIONS: Final = tuple(name for name in inspect.signature(ring_attention).parameters if name not in PASSED)


def checked(given: Mapping[str, Any], renamed: Mapping[str, str], options: Collection[str] = OPTIONS) -> dict[str, Any]:
    """The options of `ring_attention` that a user gave an adapter; raises for a name that is not among `options`.

    `renamed` maps names of options to the adapted library's names for them, which the error suggests.
    """
    names = sorted({*options} - {*renamed})
    for name in given:
        if name in renamed:
            raise InputError(name, "has another name here", f"Pass {renamed[name]}")
        if name not in names:
            guess = did_you_mean(name, sorted({*names, *renamed.values()}))
            raise InputError(name, f"is no option of this adapter{guess}", f"Options: {', '.join(names)}")
    return dict(given)


def refuse(given: Mapping[str, Any], remedy: str) -> None:
    """Raises if any of these arguments of the adapted library is set: neither `None`, `False`, 0 nor empty."""
    for name, x in given.items():
        unset = x is None or (isinstance(x, bool | int | float | str | tuple) and not x)
        if not unset:
            raise InputError(name, "is set, and the adapter does not translate it", remedy)


@contextlib.contextmanager
def errors_in_terms_of(renamed: Mapping[str, str]) -> Iterator[None]:
    """In a `with` block, makes an `InputError` of `ring_attention` name the argument as the adapted library does."""
    try:
        yield
    except InputError as error:
        if error.argument not in renamed:
            raise
        raise InputError(renamed[error.argument], error.fact, error.remedy) from error


def dropout_options(rate: tuple[str, Any], off: tuple[str, Any], key: tuple[str, Any]) -> dict[str, Any]:
    """The options of `ring_attention` for dropout; none if the rate is 0 or `off` is true.

    Each argument is a pair: the adapted library's name for the argument, and its value.
    """
    p = rate[1]
    # At rate 0 the switch `off` may be anything, also traced.
    if p is None or (not isinstance(p, jax.core.Tracer) and np.ndim(p) == 0 and p == 0) or _flag(*off):
        return {}
    if key[1] is None:
        raise InputError(key[0], f"is missing with a dropout of {p}", "Pass a jax.random.key, a new one each step")
    return {"dropout_prob": p, "dropout_seed": drawn(*key, lambda key: jax.random.bits(key, (), jnp.uint32))}


def drawn(argument: str, key: Any, draw: Callable[[Any], Any]) -> Any:
    """Returns `draw(key)`; raises if `key` is not a single random key, typed or raw."""
    try:
        return draw(key)
    except (TypeError, ValueError) as error:
        raise InputError(argument, f"is not one random key ({in_one_line(error)})", "Pass a jax.random.key") from error


def as_array(argument: str, x: Any) -> jax.Array:
    """`x` as a JAX array; raises for what JAX cannot convert."""
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        fact = f"{type(x).__name__} is not an array ({in_one_line(error)})"
        raise InputError(argument, fact, "Pass what jnp.asarray accepts") from error


def integers(argument: str, x: Any, shape: tuple[int, ...]) -> Int32[Array, "..."]:
    """`x` as int32 of this shape; refuses values outside int32, because a cast would silently change them."""
    found = x if isinstance(x, np.ndarray) else as_array(argument, x)
    if found.shape != shape or not jnp.issubdtype(found.dtype, jnp.integer):
        fact = f"has shape {found.shape} and dtype {found.dtype}"
        raise InputError(argument, fact, f"It needs integers of shape {shape}")
    known = isinstance(found, np.ndarray) or (not isinstance(found, jax.core.Tracer) and found.is_fully_addressable)
    if known and not np.can_cast(found.dtype, np.int32) and (np.asarray(found) != np.int32(found)).any():
        raise InputError(argument, "has values outside int32", "Pass values that fit int32")
    return jnp.asarray(found).astype(jnp.int32)


def dtype_of(argument: str, dtype: Any) -> Any:
    """Returns `dtype` unchanged; raises unless it is a floating-point dtype."""
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise InputError(argument, f"got {dtype!r}", "It needs a dtype of floating-point numbers, such as jnp.bfloat16")
    return dtype


def _flag(argument: str, x: Any) -> bool:
    """`x` as a Python bool; `None` is false."""
    if x is not None and (isinstance(x, jax.core.Tracer) or np.ndim(x) or x not in (0, 1)):
        raise InputError(argument, f"got {x!r}", "It must be True or False, and not traced")
    return bool(x)
