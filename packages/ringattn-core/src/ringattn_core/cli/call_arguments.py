# SPDX-License-Identifier: Apache-2.0
"""The command-line arguments that describe a call, for `ringattn explain` and `ringattn tune`."""

import argparse
from collections.abc import Callable
from typing import Any, Final

_DTYPES: Final = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def add_arrays(parser: argparse.ArgumentParser, ring: int | None = None) -> None:
    """Shapes, dtype, ring and layout; `ring` is the default number of ranks, `None` where it must be given."""
    group = parser.add_argument_group("arrays", "lengths are of the whole sequence; batch and heads of one device")
    group.add_argument(
        "--query", type=shape("B,T,N,H", 4), required=True, metavar="B,T,N,H", help="batch, tokens, heads, head size"
    )
    group.add_argument(
        "--kv", type=shape("S,K or S,K,Hv", 2, 3), metavar="S,K[,Hv]",
        help="tokens, heads and value size of the keys; by default those of the query",
    )  # fmt: skip
    group.add_argument(
        "--dtype", type=lambda text: _DTYPES.get(text, text), default="bfloat16",
        help="bfloat16 (default), float16 or float32",
    )  # fmt: skip
    of_ring = "ranks of the ring" + ("" if ring is None else f"; {ring} by default")
    group.add_argument("--ring", type=int, default=ring, required=ring is None, metavar="D", help=of_ring)
    group.add_argument(
        "--layout", default="contiguous", help="order of the tokens: contiguous (default), zigzag or striped"
    )


def add_masks(parser: argparse.ArgumentParser) -> tuple[Any, Any]:
    """`--causal`, `--window` and `--chunk`; returns the group, and the one where `--causal` excludes others."""
    group = parser.add_argument_group("masks", "a key is visible where every mask that is given lets it through")
    causal = group.add_mutually_exclusive_group()
    causal.add_argument("--causal", action="store_true", help="a query sees no later key")
    group.add_argument(
        "--window", dest="sliding_window", type=_window, metavar="W|L,R",
        help="a query sees keys at most W away, or L before it and R after it; - is unbounded",
    )  # fmt: skip
    group.add_argument(
        "--chunk", dest="chunk_size", type=int, metavar="C", help="a query sees its own chunk of C tokens, causally"
    )
    return group, causal


def add_options(parser: argparse.ArgumentParser) -> Any:
    """The options that both commands take; returns their group."""
    group = parser.add_argument_group("options")
    group.add_argument("--alibi", action="store_true", help="ALiBi slopes")
    group.add_argument("--precision", metavar="P", help="of matrix products: default, high or highest")
    group.add_argument("--fused-backward", action="store_true", help="gradients may be summed in any order")
    group.add_argument("--two-way", action="store_true", help="half of the key heads travel the other way round")
    return group


def shapes(arguments: argparse.Namespace) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The global shapes of query, key and value."""
    batch, tokens, heads, dim = arguments.query
    keys, key_heads, *value_dim = arguments.kv or (tokens, heads)
    return arguments.query, (batch, keys, key_heads, dim), (batch, keys, key_heads, *(value_dim or (dim,)))


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
