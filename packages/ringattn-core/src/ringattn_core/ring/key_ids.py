# SPDX-License-Identifier: Apache-2.0
"""The segment ids and positions of the keys of all ranks, which every rank gathers once before the hops."""

import dataclasses

from ..contract.call import Call
from .all_gather import of_all_ranks
from .blocks import Ring


def with_all_ids(ring: Ring, call: Call) -> Call:
    """The call with the ids and positions of the keys of all ranks, so that the hops send only keys and values."""
    if not ring.axis:
        return call
    arrays = {name: getattr(call, name) for name in ("kv_segment_ids", "kv_positions")}
    whole = {name: x if x is None else of_all_ranks(ring, x, x.ndim - 1) for name, x in arrays.items()}
    return dataclasses.replace(call, **whole)
