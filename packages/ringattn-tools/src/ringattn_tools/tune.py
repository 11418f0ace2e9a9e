# SPDX-License-Identifier: Apache-2.0
"""`ringattn tune` and `ringattn cache`: find and store the fastest configuration for a call, and list stored ones."""

import argparse
import json
import os
from collections.abc import Sequence

import jax
from ringattn_core.backends.discovery import Registration
from ringattn_core.call.dispatch import chosen
from ringattn_core.config import BwdParams, FwdParams
from ringattn_core.contract.call import Call
from ringattn_core.errors import InputError
from ringattn_core.placement.axes import size
from ringattn_core.strategies.run import for_engine, strategy_of
from ringattn_core.tuning.problem import Problem, of_call

from . import call_arguments, search, stored, tuned_files
from .abstract_call import AbstractCall, trace
from .output import Bytes, Rows, Title, show
from .search import Timed, shown
from .work import data_bytes


def add_tune(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Runs a backend's kernel with each of its candidate configurations, forward and backward, on arrays of these "
        "shapes, on a device of this machine. Stores the fastest, and later calls use it."
    )
    call_arguments.add(parser)
    parser.add_argument(
        "--segments", dest="documents", action="store_const", const=(), help="segment ids; their lengths do not matter"
    )
    parser.add_argument("--dry-run", action="store_true", help="store nothing")
    parser.set_defaults(run=run_tune)


def add_cache(parser: argparse.ArgumentParser) -> None:
    parser.description = "Lists every configuration that tuning has stored for this user, the newest last."
    asked = parser.add_mutually_exclusive_group()
    asked.add_argument("--clear", action="store_true", help="remove all of them")
    asked.add_argument("--json", action="store_true", help="print everything that is stored, as JSON")
    parser.set_defaults(run=run_cache)


def run_tune(arguments: argparse.Namespace) -> int:
    call = AbstractCall.of(arguments)
    _refuse_too_large(call)
    asked: list[tuple[Registration, Problem]] = []

    def on_one_rank(local: Call) -> None:
        registration = chosen(arguments.backend, local)
        run_as = for_engine(local.placed(strategy=strategy_of(registration, local)))
        asked.append((registration, of_call(registration, run_as, size(run_as.placement.roles.sequence))))

    trace(call, on_one_rank)
    registration, problem = asked[0]
    outcome = search.tune(problem, registration, keep=not arguments.dry_run)
    show(f"{problem.backend} on {problem.device}: {problem.q_length} queries by {problem.kv_length} keys a rank")
    for part, timed, best in (
        ("forward", outcome.forward, outcome.config.fwd_params),
        ("backward", outcome.backward, outcome.config.bwd_params),
    ):
        title = part if timed else f"{part}: the backend offers no candidates"
        show("", Title(title), *([candidates(timed, best)] if timed else []))
    kept = None if arguments.dry_run else tuned_files.read(problem)
    print(f"\nstored in {kept.path}" if kept else "\nnot stored")
    return 0


def _refuse_too_large(call: AbstractCall) -> None:
    """Raises `InputError` if the floating-point inputs of one rank alone exceed the memory of the device."""
    stats, pages = jax.devices()[0].memory_stats(), os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = (stats or {}).get("bytes_limit", pages)
    needed = data_bytes(call.floating) // call.ring
    if needed > memory:
        fact = f"the arrays of one rank take {Bytes(needed)}, and the device has {Bytes(memory)}"
        raise InputError("--query", fact, "Pass smaller sizes, or a larger --ring")


def candidates(timed: Sequence[Timed], best: FwdParams | BwdParams) -> Rows:
    """A table with a row for each candidate, sorted by the rounds that it was timed in, most first, then by time.

    The row of `best` is marked. The first of `timed` is the default configuration.
    """
    default = timed[0].seconds
    return [
        {
            "chosen": x.params == best,
            "parameters": shown(x.params),
            "ms": "" if x.seconds is None else f"{1e3 * x.seconds:.3f}",
            "of the default": "" if x.seconds is None or default is None else f"{x.seconds / default:.2f}",
            "rounds": x.rounds or "",
            "failure": x.failure or "",
        }
        for x in sorted(timed, key=lambda x: (-x.rounds, x.seconds or 0))
    ]


def run_cache(arguments: argparse.Namespace) -> int:
    root = tuned_files.directory()
    if root is None:
        print("there is no cache directory for this user")
        return 1
    if arguments.clear:
        try:
            print(f"removed {stored.clear()} from {root}")
        except OSError as error:
            print(f"cannot clear {root}: {error}")
            return 1
        return 0
    entries = stored.entries()
    if arguments.json:
        plain = [{**vars(entry), "config": entry.config.to_dict(), "path": str(entry.path)} for entry in entries]
        print(json.dumps(plain, indent=2))
    else:
        print(f"{len(entries)} in {root}", *map(_text, entries), sep="\n\n")
    return 0


def _text(entry: tuned_files.Entry) -> str:
    """A stored result as text: its file, the problem that was tuned, and the chosen parameters."""
    problem = dict(entry.problem)
    versions = ", ".join(" ".join(pair) for pair in problem.pop("versions"))
    told = ", ".join(f"{name} {value}" if value is not True else name for name, value in problem.items())
    forward, backward = shown(entry.config.fwd_params), shown(entry.config.bwd_params)
    return f"{entry.path.name}\n  {told}\n  {versions}\n  forward: {forward}\n  backward: {backward}"
