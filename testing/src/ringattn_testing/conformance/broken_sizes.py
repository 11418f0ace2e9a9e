# SPDX-License-Identifier: Apache-2.0
"""Kernels that are wrong for some sizes of heads, groups, sequences or tiles only."""

from typing import Any, Final

import numpy as np

from ringattn_testing.conformance.breaks import Break, Condition, bfloat16, changed, dtype, half, wrong_in
from ringattn_testing.conformance.broken_masks import whole_tile_lost
from ringattn_testing.conformance.broken_numbers import cut, last, of_results
from ringattn_testing.conformance.numpy_ring import Block, Dense


def rows_cut(size: int) -> Any:
    """Zeros in the rows after the last full tile of this size."""

    def wrong(block: Block, out: np.ndarray, lse: np.ndarray) -> Any:
        rows = np.arange(block.q_index.size) < block.q_index.size // size * size
        return (np.where(rows[:, None, None], out, 0) if rows.any() else out), lse

    return wrong


def tail_seen(right: Any, block: Block, s: np.ndarray) -> np.ndarray:
    """The lse of a kernel that leaves the rest of the last tile, which holds zeros, to the masks of the call."""
    found, rest = right(block, s), -s.shape[-1] % 16
    return np.logaddexp(found, np.log(rest)) if half(block) and rest and not Dense().masks(block) else found


def maximum_of_products(right: Any, block: Block, s: np.ndarray) -> np.ndarray:
    """The lse of a kernel that subtracts the scale times the largest product: the lowest score, if it is negative."""
    lowest = np.where(np.isneginf(s), np.inf, s).min(-1)
    beyond = (block.scale < 0) & np.isfinite(lowest) & (s.max(-1) - lowest > np.log(np.finfo(np.float32).max))
    return np.where(beyond, np.inf, right(block, s))


def doubled_with_one_key(when: Condition) -> Dense:
    return of_results(lambda block, out, lse: (2 * out, lse),
                      lambda block: when(block) and block.kv_index.size == 1 and last(block))  # fmt: skip


SIZES: Final = {
    "Of a head size that is no multiple of 8 the rest is left out": Break(
        changed(q=lambda block: cut(block.q, block.q.shape[-1] // 8 * 8))
    ),
    "Of a head size above 128 the rest is left out": Break(changed(q=lambda block: cut(block.q, 128))),
    "Of a value size above the head size the rest is left out": Break(
        changed(v=lambda block: cut(block.v, block.q.shape[-1]))
    ),
    "Of a value size that is not the head size what is beyond 64 is left out": Break(
        changed(lambda block: block.v.shape[-1] != block.q.shape[-1], v=lambda block: cut(block.v, 64)),
    ),
    "From five query heads on, each reads the keys of its neighbour": Break(
        wrong_in(
            "of_heads",
            lambda right, block, x: np.roll(right(block, x), 1, 2) if block.q.shape[2] > 4 else right(block, x),
        ),
    ),
    "From three key heads on, query head `n` reads key head `n % K`": Break(
        wrong_in(
            "of_heads",
            lambda right, block, x: np.tile(x, (1, 1, block.group, 1)) if x.shape[2] > 2 else right(block, x),
        ),
    ),
    "With one key head for more than four query heads, heads come out in reverse order": Break(
        of_results(
            lambda block, out, lse: (out[:, :, ::-1], lse), lambda block: block.k.shape[2] == 1 and block.group > 4
        ),
    ),
    "Query heads from the ninth on are zero": Break(
        of_results(lambda block, out, lse: (cut(out.swapaxes(2, 3), 8).swapaxes(2, 3), lse))
    ),
    "Rows of the batch from the fifth on are zero": Break(
        of_results(lambda block, out, lse: (cut(out.swapaxes(0, 3), 4).swapaxes(0, 3), lse))
    ),
    "Queries after the last multiple of 8 are zero in half precision": Break(of_results(rows_cut(8), half)),
    "A single query in half precision reads the keys of another group": Break(
        of_results(
            lambda block, out, lse: (out[:, :, ::-1], lse), lambda block: half(block) and block.q_index.size == 1
        ),
    ),
    "The output of blocks of one key is doubled in one dtype": Break(
        doubled_with_one_key(bfloat16),
        rarer=tuple((name, doubled_with_one_key(dtype(name))) for name in ("float16", "float32")),
    ),
    "Of five key heads the last is zero": Break(
        of_results(
            lambda block, out, lse: (cut(out.swapaxes(2, 3), 4).swapaxes(2, 3), lse), lambda block: block.k.shape[2] > 4
        ),
    ),
    "Rows of the batch from the seventh on are zero": Break(
        of_results(lambda block, out, lse: (cut(out.swapaxes(0, 3), 6).swapaxes(0, 3), lse))
    ),
    "With several key heads, the second four heads of a group of eight read the keys of the next": Break(
        wrong_in(
            "of_heads",
            lambda right, block, x: (
                right(block, x)
                if block.group != 8
                else x[:, :, np.minimum(np.arange(block.q.shape[2]) // 4, x.shape[2] - 1)]
            ),
        ),
    ),
    "Query heads from the 13th on are zero": Break(
        of_results(lambda block, out, lse: (cut(out.swapaxes(2, 3), 12).swapaxes(2, 3), lse))
    ),
    "In half precision the last tile of 128 keys is lost if it is a whole one": Break(whole_tile_lost(128, half)),
    "In half precision, without a mask, the rest of the last tile of keys counts as keys of score 0": Break(
        wrong_in("lse", tail_seen),
    ),
    "With a negative scale the number that is subtracted from the scores is the lowest of them": Break(
        wrong_in("lse", maximum_of_products),
    ),
    'The output is doubled where `precision` is lower than "highest"': Break(
        of_results(lambda block, out, lse: (2 * out if block.case.precision == "default" else out, lse)),
    ),
    "The output is doubled where `precision` is given": Break(
        of_results(lambda block, out, lse: (2 * out if block.case.precision and block.hop == 0 else out, lse)),
    ),
}
