# SPDX-License-Identifier: Apache-2.0
"""Chooses the backend of a validated call, and runs a rank's call on it."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ..backends.discovery import Registration
from ..backends.selection import refusal, select
from ..contract.call import Call, is_off
from ..contract.features import Feature
from ..contract.signature import PARAMETERS
from ..errors import InputError
from ..placement.arrays import zero_padding
from ..placement.platforms import platform_of
from ..strategies.run import run, strategy_of
from ..tuning.choice import with_parameters
from .entry import reverse_mode_only
from .options import head_sizes, needs


def chosen(backend: Any, call: Call, mesh: Any = None) -> Registration:
    """The backend that runs the call: as asked for, or the best for the devices of the mesh or of the arrays."""
    platform = platform_of(mesh, (call.query, call.key, call.value))
    return select(backend, needs(call), platform, head_sizes(call))


def answer(registration: Registration, call: Call) -> Any:
    """The backend's result for a rank's call. Differentiating it raises if the backend has no gradients."""
    backend, implementation = registration.descriptor(), registration.implementation()
    call = call if call.check is None else call.check(call)
    call = call.placed(strategy=strategy_of(registration, call))
    if backend.kernel is None:
        for name in ("balance", "return_max_logits", "kv_range", "selected"):
            if not is_off(asked := call.options[name]):
                said = {"kv_range": "a range", "selected": "an array"}.get(name) or repr(asked)
                fact = f"{said} needs a kernel of one block, but backend {registration.name!r} drives its own ring"
                raise InputError(name, fact, "Leave it out, or pass another backend")
        result = _by_ring_kernel(implementation, with_parameters(registration, call.expanded()))
    else:
        result = run(registration, call)
    return result if backend.supports(Feature.GRADIENTS) else _without_gradient(registration, result)


def _without_gradient(registration: Registration, result: Any) -> Any:
    """Returns `result` unchanged. Its backward pass raises; that runs only if a loss depends on `result`."""

    def refused() -> Exception:
        return refusal(registration, frozenset({Feature.GRADIENTS}))

    def refuse(residuals: None, cotangents: Any) -> Any:
        raise refused()

    same = jax.custom_vjp(lambda x: x)
    same.defvjp(lambda x: (x, None), refuse)
    with reverse_mode_only(refused):
        return same(result)


def _by_ring_kernel(kernel: Callable[..., Any], call: Call) -> Any:
    """Calls a backend's ring function.

    `zero_padding` and `where` serve only to keep cotangents of padding out of that function's backward pass.
    """
    given = {"query": call.query, "key": call.key, "value": call.value} | call.options
    ids, result = call.q_segment_ids, kernel(**{wanted.name: given[wanted.name] for wanted in PARAMETERS})
    if ids is None:
        return result
    if not call.return_lse:
        return zero_padding(result, ids)
    out, lse = result
    return zero_padding(out, ids), jnp.where(ids[:, None] >= 0, lse, jax.lax.stop_gradient(lse))
