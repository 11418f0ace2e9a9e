# SPDX-License-Identifier: Apache-2.0
"""The command-line arguments that describe a call, for `ringattn explain` and `ringattn tune`.

The arguments for options of `ring_attention` are made from the table in `call/options.py`, with the same names.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any, Final

from jaxtyping import Float
from ringattn_core.call import checks
from ringattn_core.call.options import OPTIONS
from ringattn_core.call.validation import DTYPES
from ringattn_core.contract.call import ARRAYS
from ringattn_core.integers import POSITION
from ringattn_core.placement import arrays
from ringattn_core.strategies import STRATEGIES

SHORT: Final = {
    "sliding_window": "--window",
    "softmax_aux": "--sinks",
    "logits_soft_cap": "--soft-cap",
    "softmax_scale": "--scale",
    "dropout_prob": "--dropout",
    "return_lse": "--lse",
}
"""Short names of arguments, by the option. (`argparse` also takes the beginning of any name.)"""
_HELP: Final = {
    "query_offset": "The position of the first query: the queries are a chunk of a longer sequence",
    "max_distance": "No query sees a key farther away in the sequence: hops and rows beyond are left out",
}
"""The help of options for which the description of the feature that they need is too general."""
_DTYPES: Final = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
_DECIDED: Final = ("B", "T", "S", "N", "K", "H")
"""The letters of the axes whose lengths the shapes of query and key decide."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that `AbstractCall.of` reads, and `--backend`."""
    given = parser.add_argument_group("arrays", "lengths are of the whole sequence; batch and heads of one device")
    given.add_argument(
        "--query", type=numbers("B,T,N,H", 4), required=True, metavar="B,T,N,H", help="batch, tokens, heads, head size"
    )
    given.add_argument(
        "--kv", type=numbers("S,K or S,K,Hv", 2, 3), metavar="S,K[,Hv]",
        help="tokens, heads and value size of the keys; by default those of the query",
    )  # fmt: skip
    given.add_argument(
        "--dtype", type=lambda text: _DTYPES.get(text, text), choices=DTYPES, default="bfloat16",
        metavar="DTYPE", help="bfloat16 (default), float16 or float32",
    )  # fmt: skip
    given.add_argument("--ring", type=int, default=1, metavar="D", help="ranks of the ring; 1 by default")
    given.add_argument(
        "--layout", default="contiguous", help="order of the tokens: contiguous (default), zigzag or striped"
    )
    masks = parser.add_argument_group("more masks", "a key is visible where every mask that is given lets it through")
    masks.add_argument(
        "--documents", type=numbers("L,L,...", 1, None), metavar="L,L,...",
        help="lengths of documents that are packed one after another; the rest is padding",
    )  # fmt: skip
    masks.add_argument("--restart-positions", action="store_true", help="positions restart at every document")
    built = masks.add_mutually_exclusive_group()
    built.add_argument("--prefix", type=int, metavar="N", help="causal, but every query sees the first N tokens")
    built.add_argument("--mask-builder", metavar="MODULE:FUNCTION", help="a mask_builder of your own")
    options = parser.add_argument_group("options of ring_attention")
    for name, how in option_arguments():
        options.add_argument(f"--{name.replace('_', '-')}", *([SHORT[name]] if name in SHORT else []), dest=name, **how)
    named = "the backend, or several to try in order; by default the one that ring_attention would take"
    parser.add_argument("--backend", type=_backends, metavar="NAME[,NAME]", help=named)


def option_arguments() -> Iterator[tuple[str, dict[str, Any]]]:
    """The options of `ring_attention` that the command line takes, each with the keywords for `add_argument`.

    A floating-point array is described by the lengths of its axes, without the axes in `_DECIDED`.
    """
    kinds: dict[Any, dict[str, Any]] = {
        checks.flag: {"action": "store_true"},
        checks.window: {"type": _window, "metavar": "W|L,R"},
        checks.chunk: {"type": int, "metavar": "C"},
        checks.query_offset: {"type": int, "metavar": "N"},
        checks.soft_cap: {"type": float, "nargs": "?", "const": 30.0, "metavar": "C"},
        checks.scale: {"type": float, "metavar": "S"},
        checks.probability: {"type": float, "nargs": "?", "const": 0.1, "default": 0.0, "metavar": "P"},
        checks.precision: {"metavar": "|".join(checks.PRECISIONS)},
        checks.strategy: {"choices": STRATEGIES},
    }
    for option in OPTIONS:
        how = kinds.get(option.check)
        array = ARRAYS.get(option.name)
        if array is not None and array.dtype is Float:
            free = ",".join(letter for letter in arrays.letters(array) if letter not in _DECIDED)
            count = free.count(",") + 1
            how = {"type": numbers(free, count), "metavar": free} if free else {"action": "store_const", "const": ()}
        if how is not None:
            said = option.feature.value.rstrip(".") if option.feature else None
            yield option.name, how | {"help": _HELP.get(option.name, said)}


def shape_of(name: str, lengths: tuple[int, ...], sizes: dict[str, int]) -> tuple[int, ...]:
    """The shape of the array `name`: axes in `_DECIDED` have the length in `sizes`, the others take `lengths`."""
    rest = iter(lengths)
    return tuple(sizes[letter] if letter in _DECIDED else next(rest) for letter in arrays.letters(ARRAYS[name]))


def numbers(wanted: str, least: int, most: int | None = -1) -> Callable[[str], tuple[int, ...]]:
    """Makes a parser of `least` to `most` comma-separated lengths, which errors describe as `wanted`.

    By default it takes exactly `least` lengths; `most=None` sets no upper limit.
    """
    most = least if most == -1 else most

    def parse(text: str) -> tuple[int, ...]:
        try:
            found = tuple(int(part) for part in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}, it needs {wanted} in whole numbers") from None
        if min(found) < 0 or max(found) > POSITION[1]:
            wrong = min(found) if min(found) < 0 else max(found)
            raise argparse.ArgumentTypeError(f"got {wrong}, it needs lengths from 0 to {POSITION[1]}")
        if len(found) < least or (most is not None and len(found) > most):
            raise argparse.ArgumentTypeError(f"got {len(found)} numbers, it needs {wanted}")
        return found

    return parse


def _backends(text: str) -> str | tuple[str, ...]:
    """Parses the name of a backend, or several names separated by commas."""
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"got {text!r}, it needs NAME or NAME,NAME")
    return names[0] if len(names) == 1 else names


def _window(text: str) -> tuple[int | None, int | None]:
    try:
        sides = [None if side.strip() in ("-", "none") else int(side) for side in text.split(",")]
    except ValueError:
        sides = []
    if len(sides) not in (1, 2):
        raise argparse.ArgumentTypeError(f"got {text!r}, it needs W or L,R: whole numbers, or - for unbounded")
    return sides[0], sides[-1]
