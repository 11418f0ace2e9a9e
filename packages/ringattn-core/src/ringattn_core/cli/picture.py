# SPDX-License-Identifier: Apache-2.0
"""How many tiles become few cells that still say which work is done."""

import numpy as np
from jaxtyping import UInt8

from .explanation import MASKED, SKIPPED, WHOLE


def shrunk(states: UInt8[np.ndarray, "q_tiles kv_tiles"], rows: int, columns: int) -> UInt8[np.ndarray, "rows columns"]:
    """`WHOLE` where every tile of a cell is, `SKIPPED` where every one is, `MASKED` for what lies between.

    Of fewer tiles than cells each is drawn several times.
    """
    lowest, highest = (
        reduce.reduceat(
            reduce.reduceat(states, _starts(rows, states.shape[0]), 0), _starts(columns, states.shape[1]), 1
        )
        for reduce in (np.minimum, np.maximum)
    )
    mixed = np.where(highest == SKIPPED, SKIPPED, MASKED)
    return np.where(lowest == WHOLE, WHOLE, mixed).astype(np.uint8)


def _starts(cells: int, tiles: int) -> np.ndarray:
    return np.arange(cells) * tiles // cells
