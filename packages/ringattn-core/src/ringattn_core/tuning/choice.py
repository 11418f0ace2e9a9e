# SPDX-License-Identifier: Apache-2.0
"""With which parameters a call runs: the first that says so of the call, an overlay, the caches and the policy."""

import dataclasses
import logging
import math
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ..backends.discovery import Registration, get, on_clear
from ..config import RingAttentionConfig
from ..contract.call import Call
from ..errors import TuningError
from ..masks.builder import Built
from ..placement.axes import size
from .overlay import OPEN, overlaid
from .policy import Policy, current
from .problem import Problem, of_call, tunable

if TYPE_CHECKING:
    from .progress import Progress
    from .tuner import Outcome

_logger: Final = logging.getLogger("ringattn")
_tuned: Final[dict[tuple[Registration, Problem], RingAttentionConfig]] = {}
_absent: Final[set[tuple[Registration, Problem]]] = set()
_failed: Final[set[tuple[Registration, Problem]]] = set()
_turn: Final = threading.Lock()


def forget() -> None:
    """Empties the cache in memory: the next call looks into the persistent one again."""
    for known in (_tuned, _absent, _failed):
        known.clear()


on_clear.append(forget)


def settled(registration: Registration, call: Call, ranks: int | None = None, mesh: Any = None) -> Call:
    """The call with the parameters that it runs with; those that it brings stay as they are.

    Its arrays are those of one shard. Forward and backward parameters are settled apart: a call that gives one of
    them leaves the other to an overlay, to the caches, and last to the backend.
    """
    forward, backward = overlaid(registration.name, call.fwd_params, call.bwd_params)
    if forward == OPEN.fwd_params or backward == OPEN.bwd_params:
        kernel = registration.implementation()
        if tunable(registration) or hasattr(kernel, "default_config"):
            ranks = size("axis_name", call.axis_name or ()) if ranks is None else ranks
            problem = of_call(registration, call, ranks, mesh)
            found = configured(registration, problem, call.mask_builder)
            forward = found.fwd_params if forward == OPEN.fwd_params else forward
            backward = found.bwd_params if backward == OPEN.bwd_params else backward
    if forward is call.fwd_params and backward is call.bwd_params:
        return call
    return dataclasses.replace(call, fwd_params=forward, bwd_params=backward)


def settled_over(
    mesh: Any, registration: Registration, options: Call, specs: Mapping[str, PartitionSpec], arrays: Any
) -> Call:
    """`options`, the part of a call that is no array, with the parameters that each shard of `arrays` runs with."""
    shards = {
        name: jax.ShapeDtypeStruct(NamedSharding(mesh, spec).shard_shape(arrays[name].shape), arrays[name].dtype)
        for name, spec in specs.items()
    }
    ranks = math.prod(mesh.shape[name] for name in options.axis_name or ())
    found = settled(registration, dataclasses.replace(options, **shards), ranks, mesh)
    return dataclasses.replace(options, fwd_params=found.fwd_params, bwd_params=found.bwd_params)


def configured(registration: Registration, problem: Problem, built: Built | None = None) -> RingAttentionConfig:
    """What the caches, the policy and the backend say, in this order; with the policy "on" it may tune."""
    policy, asked = current(), (registration, problem)
    if policy is not Policy.OFF:
        found = _tuned.get(asked) or _read(registration, problem)
        if found is None and policy is Policy.ON and asked not in _failed and tunable(registration):
            found = _tune(registration, problem, built)
        if found is not None:
            return found
    return default(registration, problem)


def default(registration: Registration, problem: Problem) -> RingAttentionConfig:
    """What the backend runs with where nobody has tuned."""
    own = getattr(registration.implementation(), "default_config", None)
    return OPEN if own is None else own(problem)


def tune(
    problem: Problem,
    built: Built | None = None,
    registration: Registration | None = None,
    progress: "Progress | None" = None,
    keep: bool = True,
) -> "Outcome":
    """Measures every candidate of the backend for this problem, and puts the fastest into both caches."""
    from . import tuner

    registration = get(problem.backend) if registration is None else registration
    outcome = tuner.fastest(registration, problem, default(registration, problem), built, progress)
    if keep:
        remember(registration, problem, outcome.config, [timed.to_dict() for timed in outcome.trials])
    return outcome


def remember(registration: Registration, problem: Problem, config: RingAttentionConfig, trials: Any = ()) -> None:
    """Puts what was tuned into both caches. A backend registered in this process has no version, and is not kept."""
    _tuned[registration, problem] = config
    if not registration.in_process:
        from . import cache

        cache.write(problem, config, trials)


def _read(registration: Registration, problem: Problem) -> RingAttentionConfig | None:
    asked = registration, problem
    if asked in _absent or registration.in_process:
        return None
    from . import cache

    entry = cache.read(problem)
    if entry is None:
        _absent.add(asked)
        return None
    return _tuned.setdefault(asked, entry.config)


def _tune(registration: Registration, problem: Problem, built: Built | None) -> RingAttentionConfig | None:
    """One at a time: two would disturb each other's measurements, and the second may find what the first stored."""
    with _turn:
        if (registration, problem) in _tuned:
            return _tuned[registration, problem]
        try:
            return tune(problem, built, registration).config
        except TuningError as error:
            _failed.add((registration, problem))
            _logger.warning("%s. Its default is used", error)
            return None
