# SPDX-License-Identifier: Apache-2.0
"""What functions that users call share: names for unknown arguments, an error for forward mode, the caller's line."""

import contextlib
import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple, ParamSpec, TypeVar

import jax

from ..errors import DerivativeError, InputError
from .options import OPTIONS

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


_NOT_THE_CALLER: Final = ("ringattn_core", "ringattn_tools", "ringattn_adapters", "jax", "contextlib")
"""`callers_line` skips functions of these packages: ours, and JAX and `contextlib`, which call ours for the caller."""

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


def entry(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Wraps a function that users call. An unknown keyword raises `InputError`, which names the right one if it can.

    `jax.debug_infs` is off inside: -inf is a valid score (masked out), and the valid lse of a row that sees no key.
    """
    known = tuple(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        for name in kwargs:
            if name not in known:
                raise InputError(name, f"is not an argument of {function.__name__}", _remedy(name, known))
        with jax.debug_infs(False), reverse_mode_only():
            return function(*args, **kwargs)

    return checked


def _no_forward_rule() -> Exception:
    return DerivativeError(
        "ring_attention was differentiated in forward mode (jvp, jacfwd), and there is no rule for that. Take "
        "derivatives in reverse mode (grad, vjp, jacrev)"
    )


@contextlib.contextmanager
def reverse_mode_only(ours: Callable[[], Exception] = _no_forward_rule) -> Iterator[None]:
    """Replaces JAX's error about forward mode by `ours()`, but not in a function that `jax.jit` traced before."""
    try:
        yield
    except TypeError as error:
        if "forward-mode" not in str(error):
            raise
        raise ours() from error


class Line(NamedTuple):
    """A line of a program. `registry` has the warnings that Python has shown in its `module`."""

    file: str
    number: int
    module: str
    registry: dict[Any, Any]


def callers_line() -> Line:
    """The line of the program that calls one of our functions."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_CALLER:
        frame = frame.f_back
    if frame is None:
        return Line("an unknown line", 0, "", {})
    module = frame.f_globals.get("__name__", "")
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    return Line(frame.f_code.co_filename, frame.f_lineno, module, registry)


def warn(message: str) -> None:
    """Warns at the caller's line, where Python shows the warning once."""
    line = callers_line()
    warnings.warn_explicit(message, UserWarning, line.file, line.number, line.module, line.registry)


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
