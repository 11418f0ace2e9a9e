# SPDX-License-Identifier: Apache-2.0
"""`ringattn tune`: times a backend's candidate configurations for one call, and stores the fastest."""

import argparse
import dataclasses
import os
from collections.abc import Sequence

import jax

from ..backends.discovery import Registration
from ..call.dispatch import chosen
from ..config import BwdParams, FwdParams
from ..contract.call import Call
from ..errors import InputError
from ..placement.axes import size
from ..strategies.choose import settled
from ..strategies.run import tuned_as
from ..strategies.work import data_bytes
from ..tuning import cache, choice
from ..tuning.problem import Problem, of_call
from ..tuning.tuner import Timed, shown
from . import call_arguments
from .abstract_call import AbstractCall
from .output import Bytes, Rows, Title, show
from .shards import trace


def add_tune(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs a backend's kernel with each of its candidate configurations, forward and backward, on arrays of these "
        "shapes, on a device of this machine. Stores the fastest, and later calls use it."
    )
    call_arguments.add(parser, ring=1)
    parser.add_argument(
        "--segments", dest="documents", action="store_const", const=(), help="segment ids; their lengths do not matter"
    )
    parser.add_argument("--dry-run", action="store_true", help="store nothing")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    call = AbstractCall.of(arguments)
    _refuse_too_large(call)
    asked: dict[str, tuple[Registration, Problem]] = {}

    def on_one_rank(local: Call) -> None:
        registration = chosen(arguments.backend, local)
        for strategy in settled(registration, local):  # "auto" may take another one for gradients
            run_as = tuned_as(dataclasses.replace(local, strategy=strategy))
            problem = of_call(registration, run_as, size("axis_name", run_as.axis_name or ()))
            asked[problem.key] = registration, problem

    trace(call, on_one_rank)
    for registration, problem in asked.values():
        _tune(registration, problem, keep=not arguments.dry_run)
    return 0


def _tune(registration: Registration, problem: Problem, keep: bool) -> None:
    """Tunes one problem, prints every candidate, and stores the fastest if `keep`."""
    outcome = choice.tune(problem, registration, keep=keep)
    show(f"{problem.backend} on {problem.device}: {problem.q_length} queries by {problem.kv_length} keys a rank")
    for part, timed, best in (
        ("forward", outcome.forward, outcome.config.fwd_params),
        ("backward", outcome.backward, outcome.config.bwd_params),
    ):
        title = part if timed else f"{part}: the backend offers no candidates"
        show("", Title(title), *([candidates(timed, best)] if timed else []))
    found = cache.read(problem) if keep else None
    print(f"\nstored in {found.path}" if found else "\nnot stored")


def _refuse_too_large(call: AbstractCall) -> None:
    """Raises for arrays of one rank that alone exceed the memory of the device."""
    stats, pages = jax.devices()[0].memory_stats(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = (stats or {}).get("bytes_limit", pages)
    needed = data_bytes(call.floating) // call.ring
    if needed > memory:
        fact = f"the arrays of one rank take {Bytes(needed)}, and the device has {Bytes(memory)}"
        raise InputError("--query", fact, "Pass smaller sizes, or a larger --ring")


def candidates(timed: Sequence[Timed], chosen: FwdParams | BwdParams) -> Rows:
    """A table of the candidates: by rounds, most first, then by time. The first of `timed` is the default."""
    default = timed[0].seconds
    return [
        {
            "chosen": x.params == chosen,
            "parameters": shown(x.params),
            "ms": "" if x.seconds is None else f"{1e3 * x.seconds:.3f}",
            "of the default": "" if x.seconds is None or default is None else f"{x.seconds / default:.2f}",
            "rounds": x.rounds or "",
            "failure": x.failure or "",
        }
        for x in sorted(timed, key=lambda x: (-x.rounds, x.seconds or 0))
    ]
