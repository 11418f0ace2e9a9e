# SPDX-License-Identifier: Apache-2.0
"""Kernels that are wrong for some sizes of heads, groups, sequences or tiles only."""

from typing import Any, Final

import numpy as np
from breaks import Break, Condition, bfloat16, changed, dtype, half, wrong_in
from broken_masks import whole_tile_lost
from broken_numbers import cut, last, of_results
from numpy_ring import Block, Dense


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
    "odd-head-size-cut": Break("Of a head size that is no multiple of 8 the rest is left out.",
                               changed(q=lambda block: cut(block.q, block.q.shape[-1] // 8 * 8))),
    "large-head-size-cut": Break("Of a head size above 128 the rest is left out.",
                                 changed(q=lambda block: cut(block.q, 128))),
    "value-size-cut-at-the-head-size": Break("Of a value size above the head size the rest is left out.",
                                             changed(v=lambda block: cut(block.v, block.q.shape[-1]))),
    "other-value-size-cut-at-64": Break(
        "Of a value size that is not the head size what is beyond 64 is left out.",
        changed(lambda block: block.v.shape[-1] != block.q.shape[-1], v=lambda block: cut(block.v, 64)),
    ),
    "heads-mixed-up": Break(
        "From five query heads on, each reads the keys of its neighbour.",
        wrong_in("of_heads", lambda right, block, x: np.roll(right(block, x), 1, 2) if block.q.shape[2] > 4
                 else right(block, x)),
    ),
    "groups-interleaved": Break(
        "From three key heads on, query head `n` reads key head `n % K`.",
        wrong_in("of_heads", lambda right, block, x: np.tile(x, (1, 1, block.group, 1)) if x.shape[2] > 2
                 else right(block, x)),
    ),
    "one-key-head-mixed-up": Break(
        "With one key head for more than four query heads, heads come out in reverse order.",
        of_results(lambda block, out, lse: (out[:, :, ::-1], lse),
                   lambda block: block.k.shape[2] == 1 and block.group > 4),
    ),
    "heads-beyond-8": Break("Query heads from the ninth on are zero.",
                            of_results(lambda block, out, lse: (cut(out.swapaxes(2, 3), 8).swapaxes(2, 3), lse))),
    "rows-beyond-4": Break("Rows of the batch from the fifth on are zero.",
                           of_results(lambda block, out, lse: (cut(out.swapaxes(0, 3), 4).swapaxes(0, 3), lse))),
    "queries-after-the-last-8": Break(
        "Queries after the last multiple of 8 are zero in half precision.", of_results(rows_cut(8), half)
    ),
    "one-query-in-half": Break(
        "A single query in half precision reads the keys of another group.",
        of_results(lambda block, out, lse: (out[:, :, ::-1], lse),
                   lambda block: half(block) and block.q_index.size == 1),
    ),
    "one-key-in-half": Break("The output of blocks of one key is doubled in one dtype.",
                             doubled_with_one_key(bfloat16), core=False,
                             rarer=tuple((name, doubled_with_one_key(dtype(name))) for name in ("float16", "float32"))),
    "key-heads-beyond-4": Break(
        "Of five key heads the last is zero.",
        of_results(lambda block, out, lse: (cut(out.swapaxes(2, 3), 4).swapaxes(2, 3), lse),
                   lambda block: block.k.shape[2] > 4),
    ),
    "rows-beyond-6": Break("Rows of the batch from the seventh on are zero.",
                           of_results(lambda block, out, lse: (cut(out.swapaxes(0, 3), 6).swapaxes(0, 3), lse))),
    "groups-of-8-split": Break(
        "With several key heads, the second four heads of a group of eight read the keys of the next.",
        wrong_in("of_heads", lambda right, block, x: right(block, x) if block.group != 8
                 else x[:, :, np.minimum(np.arange(block.q.shape[2]) // 4, x.shape[2] - 1)]),
    ),
    "heads-beyond-12": Break("Query heads from the 13th on are zero.",
                             of_results(lambda block, out, lse: (cut(out.swapaxes(2, 3), 12).swapaxes(2, 3), lse))),
    "whole-tile-lost": Break(
        "In half precision the last tile of 128 keys is lost if it is a whole one.", whole_tile_lost(128, half)
    ),
    "tail-seen-without-masks": Break(
        "In half precision, without a mask, the rest of the last tile of keys counts as keys of score 0.",
        wrong_in("lse", tail_seen),
    ),
    "maximum-of-products": Break(
        "With a negative scale the number that is subtracted from the scores is the lowest of them.",
        wrong_in("lse", maximum_of_products),
    ),
    "doubled-at-low-precision": Break(
        "The output is doubled where `precision` is lower than \"highest\".",
        of_results(lambda block, out, lse: (2 * out if block.case.precision == "default" else out, lse)),
    ),
    "doubled-at-precision": Break(
        "The output is doubled where `precision` is given.",
        of_results(lambda block, out, lse: (2 * out if block.case.precision and block.hop == 0 else out, lse)),
    ),
}  # fmt: skip
