# SPDX-License-Identifier: Apache-2.0
"""What `prefill_attention` would send for a call, keys or queries, for `ringattn explain`."""

import inspect
from collections.abc import Iterator
from typing import Any, Final

from ..call.cache import bytes_to_send, prefill_attention
from .analysis import CallAnalysis
from .output import Bytes, Rows, Title

_OPTIONS: Final = {"causal", "query_offset", *inspect.signature(prefill_attention).parameters}
"""The options of `ring_attention` that `prefill_attention` has too, or that it always sets."""


def sent(found: CallAnalysis) -> Rows:
    """A row for keys and one for queries; none unless the call has an offset and suits `prefill_attention`."""
    said = found.call.said
    if found.ranks == 1 or not {"causal", "query_offset"} <= said.keys() <= _OPTIONS:
        return []
    of_keys, of_queries = (Bytes((found.ranks - 1) * count) for count in bytes_to_send(found.shard.call))
    return [
        {"chosen": of_keys <= of_queries, "send": "keys", "sent": of_keys, "hides": "behind kernels"},
        {"chosen": of_keys > of_queries, "send": "queries", "sent": of_queries, "hides": "no"},
    ]


def report(rows: Rows) -> Iterator[Any]:
    """The heading, the table and a sentence, for `show`."""
    (taken,) = (row["send"] for row in rows if row["chosen"])
    yield Title("The same queries by prefill_attention: bytes that each rank sends")
    yield rows
    yield f"By default it sends the {taken}, which is fewer bytes. Only send='keys' has gradients."
