# SPDX-License-Identifier: Apache-2.0
"""What a choice of blocks would cost, for `ringattn explain --selected`: pairs, blocks that a tile visits, and bytes.

Which blocks queries choose is known only at run time. Neighbouring queries choose together at least what one of them
chooses, and at most what they would if their choices were independent of each other.
"""

import argparse
import dataclasses
from typing import Any, Final

from ringattn_core.contract.bits import words_of

from .analysis import CallAnalysis
from .output import Bytes, Rows, Title

NEIGHBOURS: Final = (8, 16, 64, 128)
"""How many neighbouring queries share a tile: 128, or fewer if the heads of a group are rows of the same tile."""


@dataclasses.dataclass(frozen=True)
class Chosen:
    """Each query chooses `count` blocks of `size` keys."""

    count: int
    size: int

    @classmethod
    def parsed(cls, text: str) -> "Chosen":
        """From text such as "16x128"."""
        try:
            count, size = (int(part) for part in text.lower().split("x"))
        except ValueError:
            count, size = 0, 0
        if count < 1 or size < 1:
            raise argparse.ArgumentTypeError(f"got {text!r}, it needs COUNTxSIZE, such as 16x128")
        return cls(count, size)


def report(analysis: CallAnalysis, chosen: Chosen) -> list[Any]:
    """What `ringattn explain --selected` prints beside the rest."""
    return [
        Title(f"{chosen.count} blocks of {chosen.size} keys for each query"),
        "The tables above are those of all keys that the other masks let through.",
        facts(analysis, chosen),
        visited(analysis, chosen),
    ]


def facts(analysis: CallAnalysis, chosen: Chosen) -> dict[str, Any]:
    """The share of the pairs that is left, the blocks that there are, and the bytes of ids and bits of one rank."""
    batch, tokens, _, _ = analysis.call.floating["query"].shape
    _, keys, groups, _ = analysis.call.floating["key"].shape
    queries, shard = analysis.lengths
    causal, most = bool(analysis.call.options.get("causal")), min(chosen.count * chosen.size, keys)
    last = min(tokens, keys)
    # Under a causal mask, query i sees i + 1 keys, and chooses among these.
    early = min(most, last)
    seen = early * (early + 1) // 2 + (last - early) * most if causal else tokens * most
    every = last * (last + 1) // 2 if causal else tokens * keys
    return {
        "blocks of the sequence": -(-keys // chosen.size),
        "pairs that are left": f"{100 * seen / every:.2g}%",
        "ids of one rank, one group for each key head": Bytes(4 * batch * queries * groups * chosen.count),
        "bits of one rank and hop": Bytes(4 * batch * queries * groups * words_of(shard, chosen.size)),
    }


def visited(analysis: CallAnalysis, chosen: Chosen) -> Rows:
    """How many blocks a tile of neighbouring queries visits, of those of the whole sequence."""
    blocks = -(-analysis.call.floating["key"].shape[1] // chosen.size)
    count = min(chosen.count, blocks)

    def row(queries: int) -> dict[str, Any]:
        independent = blocks * (1.0 - (1.0 - count / blocks) ** queries)
        return {"queries of a tile": queries, "at least": count, "independent choices": round(independent)}

    return [row(queries) for queries in NEIGHBOURS]


def as_json(analysis: CallAnalysis, chosen: Chosen) -> dict[str, Any]:
    return {"selected": facts(analysis, chosen) | {"visited": visited(analysis, chosen)}}
