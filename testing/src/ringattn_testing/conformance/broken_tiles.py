# SPDX-License-Identifier: Apache-2.0
# pyright: reportOptionalMemberAccess=false, reportOptionalOperand=false, reportGeneralTypeIssues=false
"""Kernels that are wrong at the edges of tiles, or where a rank has more queries than keys."""

from collections.abc import Callable
from typing import Final

import numpy as np
from ringattn_conformance.cases import DTYPES

from ringattn_testing.conformance.breaks import Break, Condition, always, dtype, masked
from ringattn_testing.conformance.broken_masks import whole_tile_lost, without_tail
from ringattn_testing.conformance.broken_numbers import of_gradients, of_kept
from ringattn_testing.conformance.numpy_ring import Block, Dense, Pair, causal, chunk_from, coordinates, window


def without_rest(name: str, size: int, when: Condition = always) -> Dense:
    """A kernel one of whose gradients is zero after the last full tile of this size."""

    def wrong(block: Block, x: np.ndarray) -> np.ndarray:
        length = x.shape[1]
        rest = (np.arange(length) >= length // size * size) & (length > size)
        return np.where(rest[:, None, None], 0, x)

    return of_gradients(name, wrong, when)


def repeated_dropout(size: int, when: Condition = always) -> Dense:
    """A kernel that drops in every tile of this many keys what it drops in the first."""

    def wrong(kept: np.ndarray, block: Block) -> np.ndarray:
        return kept[..., np.arange(kept.shape[-1]) % size]

    return of_kept(wrong, when)


def late_window(size: int, when: Condition = always) -> Dense:
    """A kernel whose first tile of a window is the one after that in which the window begins."""

    def wrong(block: Block, right: np.ndarray) -> np.ndarray:
        assert block.window is not None
        (i, j), left = coordinates(block), block.window[0]
        counted = all((np.diff(x) == 1).all() for x in (block.q_positions, block.kv_positions))
        if left is None or not counted or block.kv_index.size <= size:
            return right
        first_query, first_key = ((np.arange(x.size) // size * size) for x in (block.q_index, block.kv_index))
        return right & (j[..., first_key] >= i[:, :, first_query] - left)

    return masked("window", wrong, when)


def ends_aligned(name: str, wrong: Callable[[Block, Pair], np.ndarray], when: Condition = always) -> Dense:
    """A kernel whose mask counts more queries than keys from the end, as other libraries do."""

    def shifted(block: Block, right: np.ndarray) -> np.ndarray:
        (i, j), less = coordinates(block), block.case.q_length - block.case.kv_length
        return wrong(block, (i - less, j)) if less > 0 and block.case.positions is None else right

    return masked(name, shifted, when)


FROM_THE_END: Final[dict[str, Callable[[Block, Pair], np.ndarray]]] = {
    "causal": lambda block, at: causal(at),
    "window": lambda block, at: window(at, block.window),
    "chunk": chunk_from,
}
TILES: Final = {
    "The keys after the last multiple of 32 are left out": Break(
        without_tail(32),
        rarer=tuple((name, without_tail(256, dtype(name))) for name in DTYPES),
    ),
    "`dq` is zero after the last multiple of 32 queries": Break(
        without_rest("dq", 32),
        rarer=tuple((name, without_rest("dq", 256, dtype(name))) for name in DTYPES),
    ),
    "`dk` is zero after the last multiple of 32 keys": Break(
        without_rest("dk", 32),
        rarer=tuple((name, without_rest("dk", 256, dtype(name))) for name in DTYPES),
    ),
    "The last tile of 16 keys is lost if it is a whole one": Break(
        whole_tile_lost(16),
        rarer=tuple((name, whole_tile_lost(256, dtype(name))) for name in DTYPES),
    ),
    "Every tile of 32 keys drops what the first drops": Break(
        repeated_dropout(32),
        rarer=(
            *((name, repeated_dropout(256, dtype(name))) for name in DTYPES),
            ("float32", repeated_dropout(512, dtype("float32"))),
        ),
    ),
    "The tile of 16 keys in which a window begins is left out": Break(
        late_window(16),
        rarer=tuple((name, late_window(256, dtype(name))) for name in DTYPES),
    ),
    "With more queries than keys `causal`, windows or chunks count from the end": Break(
        ends_aligned("causal", FROM_THE_END["causal"]),
        rarer=tuple(
            (narrow, ends_aligned(name, wrong, dtype(narrow)))
            for name, wrong in FROM_THE_END.items()
            for narrow in ("float32", "float16")
        ),
    ),
}
