# SPDX-License-Identifier: Apache-2.0
"""`ringattn tune`: times a backend's candidate configurations for one call, and stores the fastest."""

import argparse
from typing import TYPE_CHECKING, Any, Final

from . import call_arguments
from .output import Table, Title, show

if TYPE_CHECKING:
    from ..backends.discovery import Registration
    from ..tuning.problem import Problem

_OPTIONS: Final = ("sliding_window", "chunk_size", "causal", "layout", "precision", "fused_backward", "two_way")
"""The options of the call that the command line passes on unchanged."""


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "tune",
        help="time a backend's candidate configurations for a call, and store the fastest",
        description="Runs a backend's kernel with each of its candidate configurations, forward and backward, on "
        "arrays of these shapes, on a device of this machine. Stores the fastest, and later calls use it.",
    )
    call_arguments.add_arrays(parser, ring=1)
    call_arguments.add_masks(parser)
    options = call_arguments.add_options(parser)
    options.add_argument("--segments", action="store_true", help="segment ids, as of packed documents")
    options.add_argument("--soft-cap", action="store_true", help="capped scores")
    options.add_argument("--dropout", action="store_true", help="dropout")
    parser.add_argument("--backend", metavar="NAME", help="by default the one that the call would get")
    parser.add_argument("--dry-run", action="store_true", help="store nothing")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..tuning import cache, choice

    registration, problem = _problem(arguments)
    outcome = choice.tune(problem, registration=registration, keep=not arguments.dry_run)
    show(f"{problem.backend} on {problem.device}: {problem.q_length} queries by {problem.kv_length} keys a rank")
    for part, timed, chosen in (
        ("forward", outcome.forward, outcome.config.fwd_params),
        ("backward", outcome.backward, outcome.config.bwd_params),
    ):
        title = part if timed else f"{part}: the backend offers no candidates"
        show("", Title(title), *([candidates(timed, chosen)] if timed else []))
    found = None if arguments.dry_run else cache.read(problem)
    print(f"\nstored in {found.path}" if found else "\nnot stored")
    return 0


def candidates(timed: Any, chosen: Any) -> Table:
    """The candidates, those that stayed longest first, then the fastest; the first of `timed` is the default."""
    from ..tuning.tuner import shown

    rows, default = [], timed[0].seconds
    for candidate in sorted(timed, key=lambda candidate: (-candidate.rounds, candidate.seconds or 0)):
        row = ["*" if candidate.params == chosen else "", shown(candidate.params)]
        if candidate.seconds is None:
            rows.append([*row, "", "", "", candidate.failure])
            continue
        ratio = "" if default is None else f"{candidate.seconds / default:.2f}"
        rows.append([*row, f"{1e3 * candidate.seconds:.3f}", ratio, str(candidate.rounds), ""])
    return Table(("", "parameters", "ms", "of the default", "rounds", ""), rows, right="  rrr")


def _problem(arguments: argparse.Namespace) -> "tuple[Registration, Problem]":
    """The backend, and the tuning problem of one shard. Raises what the call itself would raise."""
    import jax
    import jax.numpy as jnp

    from ..backends.selection import select
    from ..call.options import needs
    from ..call.validation import validated
    from ..errors import InputError
    from ..placement.layout import canonical, pieces
    from ..placement.platforms import platform_of
    from ..tuning.problem import of_call
    from .abstract_call import checked_dtype, checked_ring

    ring, dtype = checked_ring(arguments.ring), checked_dtype(arguments.dtype)
    shards = ring * pieces(canonical(arguments.layout))
    shapes = call_arguments.shapes(arguments)
    for name, shape in (("--query", shapes[0]), ("--kv", shapes[1])):
        if shape[1] % shards:
            raise InputError(
                name, f"its length {shape[1]} does not split over {ring} ranks", f"Pass a multiple of {shards}"
            )
    local = [jax.ShapeDtypeStruct((batch, length // ring, *rest), dtype) for batch, length, *rest in shapes]

    def trace(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
        call = validated(
            query,
            key,
            value,
            q_segment_ids=jnp.zeros(query.shape[:2], jnp.int32) if arguments.segments else None,
            kv_segment_ids=jnp.zeros(key.shape[:2], jnp.int32) if arguments.segments else None,
            logits_soft_cap=30.0 if arguments.soft_cap else None,
            alibi_slopes=jnp.ones(query.shape[2], jnp.float32) if arguments.alibi else None,
            dropout_prob=0.1 if arguments.dropout else 0.0,
            dropout_seed=0 if arguments.dropout else None,
            **{name: getattr(arguments, name) for name in _OPTIONS},
        )
        registration = select(arguments.backend, needs(call), platform_of(None, ()))
        found.append((registration, of_call(registration, call, ring)))

    found: list[tuple[Registration, Problem]] = []
    jax.eval_shape(trace, *local)
    return found[0]
