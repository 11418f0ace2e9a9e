# SPDX-License-Identifier: Apache-2.0
"""How a call is told on a command line."""

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .request import Request

_DTYPES: Final = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def add(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which call is meant; `request` reads them."""
    shapes = parser.add_argument_group("arrays", "lengths are those of the whole sequence; the rest is of one device")
    shapes.add_argument(
        "--query", type=shape("B,T,N,H", 4), required=True, metavar="B,T,N,H", help="batch, tokens, heads, head size"
    )
    shapes.add_argument(
        "--kv", type=shape("S,K or S,K,Hv", 2, 3), metavar="S,K[,Hv]",
        help="keys, key heads and value size; by default those of the query",
    )  # fmt: skip
    shapes.add_argument("--dtype", type=_dtype, default="bfloat16", help="bfloat16 (default), float16 or float32")
    shapes.add_argument("--ring", type=int, required=True, metavar="D", help="ranks of the ring")
    shapes.add_argument(
        "--layout", default="contiguous", help="contiguous (default), zigzag, striped: the order of the sequence"
    )
    shown = parser.add_argument_group("masks", "all that are given are ANDed")
    order = shown.add_mutually_exclusive_group()
    order.add_argument("--causal", action="store_true", help="a query sees no key after it")
    order.add_argument("--prefix", type=int, metavar="N", help="causal, but everyone sees the first N tokens")
    order.add_argument("--mask-builder", metavar="MODULE:FUNCTION", help="a mask_builder of your own")
    shown.add_argument(
        "--window", type=_window, metavar="W|L,R", help="keys within W, or L before and R after; - is unbounded"
    )
    shown.add_argument("--chunk", type=int, metavar="C", help="a query sees its own chunk of C tokens, causally")
    shown.add_argument(
        "--documents", type=shape("lengths", 1, None), metavar="L,L,...",
        help="lengths of documents that are packed one after another; the rest is padding",
    )  # fmt: skip
    shown.add_argument("--restart-positions", action="store_true", help="positions restart at every document")
    more = parser.add_argument_group("options")
    more.add_argument("--bias", type=shape("B,N,T,S", 4), metavar="B,N,T,S", help="the shape of a bias; axes may be 1")
    more.add_argument("--sinks", type=int, metavar="n", help="attention sinks of each head")
    more.add_argument("--alibi", action="store_true", help="ALiBi slopes")
    more.add_argument("--dropout", type=float, default=0.0, metavar="P", help="probability of dropping")
    more.add_argument("--soft-cap", type=float, metavar="C", help="scores are capped by tanh")
    more.add_argument("--scale", type=float, metavar="S", help="the scale of the scores")
    more.add_argument("--lse", action="store_true", help="the log of the denominator comes back too")
    more.add_argument("--precision", metavar="P", help="default, high or highest")
    more.add_argument("--fused-backward", action="store_true", help="a backward in any order is welcome")
    more.add_argument("--two-way", action="store_true", help="half of the heads travel the other way round")


def request(arguments: argparse.Namespace) -> "Request":
    """The call that the arguments tell."""
    from .request import Request

    batch, tokens, heads, dim = arguments.query
    keys, key_heads, *value_dim = arguments.kv or (tokens, heads)
    return Request(
        query=arguments.query,
        key=(batch, keys, key_heads, dim),
        value=(batch, keys, key_heads, *(value_dim or (dim,))),
        ring=arguments.ring,
        dtype=arguments.dtype,
        layout=arguments.layout,
        causal=arguments.causal,
        sliding_window=arguments.window,
        chunk_size=arguments.chunk,
        documents=arguments.documents,
        restart_positions=arguments.restart_positions,
        prefix=arguments.prefix,
        mask_builder=arguments.mask_builder,
        logits_soft_cap=arguments.soft_cap,
        softmax_scale=arguments.scale,
        sinks=arguments.sinks,
        bias=arguments.bias,
        alibi=arguments.alibi,
        dropout_prob=arguments.dropout,
        return_lse=arguments.lse,
        precision=arguments.precision,
        fused_backward=arguments.fused_backward,
        two_way=arguments.two_way,
    )


def shape(wanted: str, least: int, most: int | None = -1) -> Callable[[str], tuple[int, ...]]:
    """Integers between commas, from `least` to `most` of them: exactly `least` by default, any number for `None`."""
    most = least if most == -1 else most

    def parse(text: str) -> tuple[int, ...]:
        try:
            numbers = tuple(int(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}, it needs whole numbers {wanted}") from None
        if min(numbers) < 0:
            raise argparse.ArgumentTypeError(f"got {min(numbers)}, it needs lengths of 0 or more")
        if len(numbers) < least or (most is not None and len(numbers) > most):
            raise argparse.ArgumentTypeError(f"got {len(numbers)} numbers, it needs {wanted}")
        return numbers

    return parse


def _window(text: str) -> tuple[int | None, int | None]:
    try:
        sides = [None if side in ("-", "none") else int(side) for side in text.split(",")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2):
        raise argparse.ArgumentTypeError(f"got {text!r}, it needs W or L,R: whole numbers, or - for unbounded")
    return sides[0], sides[-1]


def _dtype(text: str) -> Any:
    return _DTYPES.get(text, text)
