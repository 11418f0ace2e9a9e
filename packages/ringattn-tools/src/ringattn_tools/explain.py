# SPDX-License-Identifier: Apache-2.0
"""`ringattn explain`: what a call would do, without running it."""

import argparse
import json
import textwrap
from pathlib import Path
from typing import Final

from . import call_arguments, chosen_blocks, layers, memory, picture, plans, report
from .abstract_call import AbstractCall
from .analysis import analyse
from .output import show

_DESCRIPTION: Final = (
    "Shows what a call of ring_attention would do, without running it and without its devices: which backends could "
    "run it and why the others cannot, which hops the ring makes, which tiles each rank computes at each hop, what is "
    "sent, what one device holds, and, on devices that were measured or with --rate and --link, what each strategy "
    "would cost. Exits with 1 where no backend can run the call."
)
_EXAMPLES: Final = """examples:
  ringattn explain --query 1,131072,32,128 --kv 131072,8 --ring 8 --causal --layout zigzag
  ringattn explain --query 1,32768,8,64 --ring 8 --causal --window 4096,0 --svg ring.svg
  ringattn explain --query 2,8192,8,64 --ring 4 --documents 3000,1200 --compile
  ringattn explain --query 1,4096,32,128 --kv 131072,8 --ring 8 --causal --query-offset 126976
  ringattn explain --query 1,131072,16,128 --ring 4 --causal --device h200 --layers 5*window=1023,1*global
  ringattn explain --query 1,131072,64,128 --kv 131072,4 --ring 8 --causal --layout zigzag --selected 16x128
  ringattn explain --query 1,1048576,32,128 --ring 64 --inner 8 --device h200 --link nvlink,40
"""


def add_explain(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = textwrap.fill(_DESCRIPTION, 79), _EXAMPLES
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    call_arguments.add(parser)
    parser.add_argument(
        "--platform", choices=("cpu", "cuda", "rocm", "tpu"), help="by default that of the devices here"
    )
    parser.add_argument(
        "--selected", type=chosen_blocks.Chosen.parsed, metavar="NxC",
        help="each query chooses N blocks of C keys: also say pairs, blocks that a tile visits, and bytes",
    )  # fmt: skip
    parser.add_argument(
        "--layers", type=layers.parsed, metavar="LAYERS",
        help="compare layouts for a model with these layers, such as 5*window=1023,1*global, and print nothing else",
    )  # fmt: skip
    plans.add(parser)
    shown = parser.add_argument_group("output")
    shown.add_argument(
        "--tile", type=call_arguments.numbers("Q,K", 2), metavar="Q,K", help="queries and keys of a tile"
    )
    shown.add_argument("--json", action="store_true", help="print everything but the picture as JSON")
    shown.add_argument("--full", action="store_true", help="in JSON, the tiles of every rank, however many there are")
    for kind in picture.KINDS:
        shown.add_argument(f"--{kind}", type=Path, metavar="FILE", help=f"write the picture as {kind.upper()}")
    shown.add_argument(
        "--compile", action="store_true", help="compile the call for devices here, and print the memory that XLA plans"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.layers:
        return layers.run(arguments)
    call = AbstractCall.of(arguments)
    if arguments.compile:
        memory.provide_devices(arguments.ring)  # before JAX is asked for the devices here
    platform = plans.platform_of(arguments)
    analysis = analyse(call, platform, arguments.backend, arguments.tile, arguments.compile)
    for kind in picture.KINDS:
        if getattr(arguments, kind) is not None:
            picture.save(analysis, getattr(arguments, kind), kind)
    reckoning = plans.reckoning(analysis, arguments)
    if arguments.json:
        told = report.as_json(analysis, arguments.full) | plans.as_json(reckoning)
        if arguments.selected:
            told |= chosen_blocks.as_json(analysis, arguments.selected)
        print(json.dumps(told, indent=2))
    else:
        report.report(analysis, picture.text(analysis))
        if arguments.selected:
            show("", *chosen_blocks.report(analysis, arguments.selected))
        show("", *plans.report(reckoning))
    return int(analysis.choice is None)
