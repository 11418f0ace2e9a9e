# SPDX-License-Identifier: Apache-2.0
"""Checks that the ids in `selected` name blocks of the sequence, and that no block lies on two ranks."""

from typing import Any

from ..contract.call import Call
from ..errors import InputError
from ..integers import fitting
from ..placement.layout import pieces


def with_size(options: dict[str, Any], keys: int) -> dict[str, Any]:
    """The options with a `selected_size`, which is 1 without `selected`. `keys` is the length of the whole sequence.

    Raises for a size without ids, and for ids of blocks beyond the sequence, as far as their values are known here.
    """
    ids, size = options.get("selected"), options.get("selected_size") or 1
    if ids is None:
        if size > 1:
            raise InputError("selected_size", f"is {size}, but there is no selected", "Pass the ids too")
        return options | {"selected_size": 1}
    blocks = -(-keys // size)
    remedy = f"Pass ids from 0 to {blocks - 1}, the blocks of {size} of {keys} keys, or -1 for none"
    fitting("selected", ids, (-1, blocks - 1, remedy))
    return options | {"selected_size": size}


def refuse_straddling(call: Call, ranks: int, keys: int) -> None:
    """Raises if a block may lie on two of the `ranks`, or in two chunks of one. Each rank has `keys` keys."""
    size, layout = call.selected_size, call.placement.balance or call.placement.layout
    if size == 1 or ranks == 1:
        return
    if layout == "striped":
        fact = f"is {size}, but in striped order neighbouring keys lie on different ranks"
        raise InputError("selected_size", fact, "Pass ids of single keys with selected_size=1, or use another layout")
    run = keys // pieces(layout)
    if run % size:
        where = "each of the two chunks of a rank" if pieces(layout) > 1 else "the shard of a rank"
        fact = f"is {size}, which does not divide {where}, of {run} keys"
        raise InputError("selected_size", fact, f"Pad the keys so that {ranks * pieces(layout) * size} divides them")
