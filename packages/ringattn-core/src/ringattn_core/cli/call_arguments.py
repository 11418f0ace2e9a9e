# SPDX-License-Identifier: Apache-2.0
"""The command-line arguments that describe a call, for `ringattn explain` and `ringattn tune`."""

import argparse
from collections.abc import Callable
from typing import Final

_DTYPES: Final = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def add(parser: argparse.ArgumentParser, ring: int | None = None) -> None:
    """Adds them, each stored under its name in `AbstractCall`. `ring` is its default; `None`: it must be given."""
    arrays = parser.add_argument_group("arrays", "lengths are of the whole sequence; batch and heads of one device")
    arrays.add_argument(
        "--query", type=shape("B,T,N,H", 4), required=True, metavar="B,T,N,H", help="batch, tokens, heads, head size"
    )
    arrays.add_argument(
        "--kv", type=shape("S,K or S,K,Hv", 2, 3), metavar="S,K[,Hv]",
        help="tokens, heads and value size of the keys; by default those of the query",
    )  # fmt: skip
    arrays.add_argument(
        "--dtype", type=lambda text: _DTYPES.get(text, text), default="bfloat16",
        help="bfloat16 (default), float16 or float32",
    )  # fmt: skip
    of_ring = "ranks of the ring" + ("" if ring is None else f"; {ring} by default")
    arrays.add_argument("--ring", type=int, default=ring, required=ring is None, metavar="D", help=of_ring)
    arrays.add_argument(
        "--layout", default="contiguous", help="order of the tokens: contiguous (default), zigzag or striped"
    )
    masks = parser.add_argument_group("masks", "a key is visible where every mask that is given lets it through")
    order = masks.add_mutually_exclusive_group()
    order.add_argument("--causal", action="store_true", help="a query sees no later key")
    order.add_argument("--prefix", type=int, metavar="N", help="causal, but every query sees the first N tokens")
    order.add_argument("--mask-builder", metavar="MODULE:FUNCTION", help="a mask_builder of your own")
    masks.add_argument(
        "--window", dest="sliding_window", type=_window, metavar="W|L,R",
        help="a query sees keys at most W away, or L before it and R after it; - is unbounded",
    )  # fmt: skip
    masks.add_argument(
        "--chunk", dest="chunk_size", type=int, metavar="C", help="a query sees its own chunk of C tokens, causally"
    )
    masks.add_argument(
        "--documents", type=shape("lengths", 1, None), metavar="L,L,...",
        help="lengths of documents that are packed one after another; the rest is padding",
    )  # fmt: skip
    masks.add_argument("--restart-positions", action="store_true", help="positions restart at every document")
    options = parser.add_argument_group("options")
    options.add_argument("--bias", type=shape("B,N,T,S", 4), metavar="B,N,T,S", help="shape of a bias; axes may be 1")
    options.add_argument("--sinks", type=int, metavar="n", help="attention sinks of each head")
    options.add_argument("--alibi", action="store_true", help="ALiBi slopes")
    options.add_argument(
        "--dropout",
        dest="dropout_prob",
        type=float,
        nargs="?",
        default=0.0,
        const=0.1,
        metavar="P",
        help="rate of dropout",
    )
    options.add_argument(
        "--soft-cap", dest="logits_soft_cap", type=float, nargs="?", const=30.0, metavar="C", help="cap of the scores"
    )
    options.add_argument("--scale", dest="softmax_scale", type=float, metavar="S", help="scale of the scores")
    options.add_argument("--lse", dest="return_lse", action="store_true", help="return the log-sum-exp too")
    options.add_argument("--precision", metavar="P", help="of matrix products: default, high or highest")
    options.add_argument("--fused-backward", action="store_true", help="gradients may be summed in any order")
    options.add_argument("--two-way", action="store_true", help="half of the key heads travel the other way round")


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
