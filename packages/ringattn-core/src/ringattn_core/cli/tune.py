# SPDX-License-Identifier: Apache-2.0
"""`ringattn tune`: measures the candidates of a backend for one call, and keeps the fastest."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from ..backends.discovery import Registration
    from ..config import BwdParams, FwdParams
    from ..tuning.problem import Problem
    from ..tuning.tuner import Timed

_DTYPES: Final = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "tune",
        help="measure a backend's candidates for a call, and keep the fastest",
        description="Runs a backend's kernel with each of its candidate configurations, forward and backward, on "
        "arrays of the shapes given, on a device of this machine, and puts the fastest where later calls find it.",
    )
    shapes = parser.add_argument_group("arrays", "lengths are those of the whole sequence; the rest is of one device")
    shapes.add_argument(
        "--query", type=_numbers(4, 4), required=True, metavar="B,T,N,H", help="batch, tokens, heads, head size"
    )
    shapes.add_argument(
        "--kv", type=_numbers(2, 3), metavar="S,K[,Hv]", help="keys, key heads, value size; by default the query's"
    )
    shapes.add_argument("--dtype", default="bfloat16", help="bfloat16 (default), float16 or float32")
    shapes.add_argument("--ring", type=int, default=1, metavar="D", help="ranks of the ring; 1 by default")
    shapes.add_argument("--layout", default="contiguous", help="contiguous (default), zigzag or striped")
    options = parser.add_argument_group("options", "those of the call that its time depends on")
    options.add_argument("--causal", action="store_true", help="a query sees no key after it")
    options.add_argument(
        "--window", type=_numbers(1, 2), metavar="W|L,R", help="keys within W, or L before and R after"
    )
    options.add_argument("--chunk", type=int, metavar="C", help="a query sees its own chunk of C tokens, causally")
    options.add_argument("--segments", action="store_true", help="segment ids, as of packed documents")
    options.add_argument("--soft-cap", action="store_true", help="scores are capped by tanh")
    options.add_argument("--alibi", action="store_true", help="ALiBi slopes")
    options.add_argument("--dropout", action="store_true", help="dropout")
    options.add_argument("--precision", choices=("default", "high", "highest"), help="of the products")
    options.add_argument("--fused-backward", action="store_true", help="a backward in any order is welcome")
    options.add_argument("--two-way", action="store_true", help="half of the key heads travel the other way round")
    parser.add_argument("--backend", metavar="NAME", help="by default the one that the call would have")
    parser.add_argument("--dry-run", action="store_true", help="measure, and keep nothing")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from ..tuning import cache, choice

    registration, problem = _asked(arguments)
    outcome = choice.tune(problem, registration=registration, keep=not arguments.dry_run)
    print(f"{problem.backend} on {problem.device}: {problem.q_length} queries by {problem.kv_length} keys a rank")
    for part, timed, chosen in (
        ("forward", outcome.forward, outcome.config.fwd_params),
        ("backward", outcome.backward, outcome.config.bwd_params),
    ):
        print(f"\n{part}" if timed else f"\n{part}: the backend offers no candidates")
        for line in lines(timed, chosen):
            print(line)
    found = None if arguments.dry_run else cache.read(problem)
    print(f"\nkept in {found.path}" if found else "\nnot kept")
    return 0


def lines(timed: Sequence["Timed"], chosen: "FwdParams | BwdParams") -> Iterator[str]:
    """Candidates, those that stayed longest first, then from the fastest; the default is the first of `timed`."""
    from ..tuning.tuner import shown

    widest = max((len(shown(candidate.params)) for candidate in timed), default=0)
    for candidate in sorted(timed, key=lambda candidate: (-candidate.rounds, candidate.seconds)):
        name = f"{'*' if candidate.params == chosen else ' '} {shown(candidate.params):<{widest}}"
        if candidate.seconds is None:
            yield f"{name}  {candidate.failure}"
            continue
        default = timed[0].seconds
        beside = "" if default is None else f"  {candidate.seconds / default:5.2f} of the default"
        yield f"{name}  {1e3 * candidate.seconds:10.3f} ms{beside}, rounds: {candidate.rounds}"


def _asked(arguments: argparse.Namespace) -> "tuple[Registration, Problem]":
    """The backend and the problem of one shard, refused by what refuses the call itself."""
    import jax
    import jax.numpy as jnp

    from ..backends.selection import select
    from ..call.options import needs
    from ..call.validation import DTYPES, validated
    from ..errors import InputError
    from ..placement.layout import canonical, pieces
    from ..placement.platforms import platform_of
    from ..tuning.problem import of_call

    batch, tokens, heads, dim = arguments.query
    keys, key_heads, *value_dim = arguments.kv or (tokens, heads)
    ring = arguments.ring
    if ring < 1:
        raise InputError("--ring", f"got {ring}", "Pass the number of ranks, 1 or more")
    shards = ring * pieces(canonical(arguments.layout))
    for name, length in (("--query", tokens), ("--kv", keys)):
        if length % shards:
            raise InputError(
                name, f"its length {length} does not split over {ring} ranks", f"Pass a multiple of {shards}"
            )
    tokens, keys = tokens // ring, keys // ring
    dtype = _DTYPES.get(arguments.dtype, arguments.dtype)
    window = arguments.window
    found: list[tuple[Registration, Problem]] = []

    def trace(query: jax.Array, key: jax.Array, value: jax.Array) -> None:
        call = validated(
            query,
            key,
            value,
            q_segment_ids=jnp.zeros((batch, tokens), jnp.int32) if arguments.segments else None,
            kv_segment_ids=jnp.zeros((batch, keys), jnp.int32) if arguments.segments else None,
            sliding_window=window[0] if window is not None and len(window) == 1 else window,
            chunk_size=arguments.chunk,
            causal=arguments.causal,
            logits_soft_cap=30.0 if arguments.soft_cap else None,
            alibi_slopes=jnp.ones((heads,), jnp.float32) if arguments.alibi else None,
            dropout_prob=0.1 if arguments.dropout else 0.0,
            dropout_seed=0 if arguments.dropout else None,
            layout=arguments.layout,
            precision=arguments.precision,
            fused_backward=arguments.fused_backward,
            two_way=arguments.two_way,
        )
        registration = select(arguments.backend, needs(call), platform_of(None, ()))
        found.append((registration, of_call(registration, call, None, ring)))

    shapes = (batch, tokens, heads, dim), (batch, keys, key_heads, dim), (batch, keys, key_heads, *(value_dim or [dim]))
    if dtype not in DTYPES:
        raise InputError("--dtype", f"got {arguments.dtype!r}", f"Pass one of {', '.join(DTYPES)}")
    jax.eval_shape(trace, *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))
    return found[0]


def _numbers(least: int, most: int) -> Callable[[str], tuple[int, ...]]:
    def parse(text: str) -> tuple[int, ...]:
        try:
            numbers = tuple(int(part) for part in text.split(","))
        except ValueError:
            numbers = ()
        if not least <= len(numbers) <= most:
            wanted = str(least) if least == most else f"{least} to {most}"
            raise argparse.ArgumentTypeError(f"got {text!r}, it needs {wanted} whole numbers between commas")
        return numbers

    return parse
