# SPDX-License-Identifier: Apache-2.0
"""`ringattn explain`: what a call would do, without running it."""

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from . import call_arguments
from .screen import Screen

if TYPE_CHECKING:
    from .explanation import Explanation

_DESCRIPTION: Final = (
    "Says what a call of ring_attention would do, without running it and without the devices: which backends could "
    "answer it and why the others not, which hops are made, which tiles each rank computes at each hop, what is sent, "
    "and what one device holds. Exits with 1 where no backend can run the call."
)
_EXAMPLES: Final = """examples:
  ringattn explain --query 1,131072,32,128 --kv 131072,8 --ring 8 --causal --layout zigzag
  ringattn explain --query 1,32768,8,64 --ring 8 --causal --window 4096,0 --svg ring.svg
  ringattn explain --query 2,8192,8,64 --ring 4 --documents 3000,1200 --compile
"""


def add(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "explain",
        help="what a call would do: backend, hops, tiles, bytes, memory",
        description=textwrap.fill(_DESCRIPTION, 79),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    call_arguments.add(parser)
    chosen = parser.add_argument_group("backend")
    chosen.add_argument("--backend", metavar="NAME[,NAME]", help="a backend, or several to try in order")
    chosen.add_argument("--platform", help="cpu, cuda, rocm or tpu; by default that of the devices here")
    shown = parser.add_argument_group("output")
    shown.add_argument("--tile", type=call_arguments.shape("Q,K", 2), metavar="Q,K", help="queries and keys of a tile")
    shown.add_argument("--json", action="store_true", help="everything but the picture, as JSON")
    shown.add_argument("--svg", type=Path, metavar="FILE", help="write the picture as SVG")
    shown.add_argument("--png", type=Path, metavar="FILE", help="write the picture as PNG; needs matplotlib")
    shown.add_argument(
        "--compile", action="store_true", help="compile the call for devices here, and say what memory XLA plans"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    request = call_arguments.request(arguments)
    if arguments.compile:
        from .compiling import provide_devices

        provide_devices(arguments.ring)
    from ..placement.platforms import platform_of
    from .explaining import explain

    found = explain(
        request,
        arguments.platform or platform_of(None, ()),
        tuple(arguments.backend.split(",")) if arguments.backend and "," in arguments.backend else arguments.backend,
        arguments.tile,
        arguments.compile,
    )
    _draw(found, arguments)
    if arguments.json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        from .report import report

        print("\n".join(report(found, Screen.of(sys.stdout))))
    return int(found.choice is None)


def _draw(found: "Explanation", arguments: argparse.Namespace) -> None:
    from ..errors import InputError
    from .scene import scene

    for option in ("svg", "png"):
        path = getattr(arguments, option)
        if path is None:
            continue
        if option == "svg":
            from .svg import written
        else:
            from .png import written
        try:
            path.write_bytes(written(scene(found)))
        except OSError as error:
            raise InputError(f"--{option}", f"cannot write {path}: {error.strerror}", "Name another file") from error
