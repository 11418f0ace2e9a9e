# SPDX-License-Identifier: Apache-2.0
# pyright: reportOptionalMemberAccess=false, reportOptionalOperand=false, reportGeneralTypeIssues=false
"""Kernels that are wrong on one side of a branch on ordinary sizes: each option by each class of a size, and others."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
from ringattn_conformance.cases import DTYPES
from ringattn_conformance.factors import Level, levels_of

from ringattn_testing.conformance.breaks import Break, Condition, changed, in_dtype, masked, wrong_in
from ringattn_testing.conformance.broken_masks import first_keys, lost
from ringattn_testing.conformance.broken_numbers import cut, last, of_bias_values, of_gradients, of_kept, of_results
from ringattn_testing.conformance.numpy_ring import Block, Dense, coordinates, finite


def rows(block: Block) -> int:
    return block.q_index.size


def keys(block: Block) -> int:
    return block.kv_index.size


def whole_tiles(block: Block) -> bool:
    return rows(block) % 128 == 0 and keys(block) % 128 == 0


def one_query(block: Block) -> bool:
    return rows(block) == 1 and keys(block) > 2048


def many_queries(block: Block) -> bool:
    return rows(block) > 512


def few_queries(block: Block) -> bool:
    return 2 <= rows(block) <= 8 and keys(block) > 64


def without_options(block: Block) -> bool:
    return not Dense().masks(block) and block.soft_cap is None and block.kept is None and block.bias is None


def in_half(x: Any) -> Any:
    return np.asarray(x).astype(DTYPES["bfloat16"]).astype(np.float64)


def summed_in_half(right: Any, block: Block, s: np.ndarray) -> np.ndarray:
    """An lse whose sum is rounded to half precision after each tile of 64 keys."""
    if not (block.half and one_query(block)):
        return right(block, s)
    largest = finite(s.max(-1, keepdims=True))
    total = np.zeros(s.shape[:-1])
    for start in range(0, s.shape[-1], 64):
        total = in_half(total + np.exp(s[..., start : start + 64] - largest).sum(-1))
    return largest[..., 0] + np.log(np.maximum(total, 1e-300))


def late_tile(block: Block, right: np.ndarray) -> np.ndarray:
    """The window without the tile of 64 keys in which it begins, where it is longer than a tile."""
    left, (i, j) = block.window[0], coordinates(block)
    if not left or left < 64 or keys(block) <= 64:
        return right
    begin = np.maximum(i[:, :, :1] - left, j[..., :1])
    return right & (j >= begin // 64 * 64 + np.where(begin > j[..., :1], 64, 0))


def chunk_of_the_first_row(block: Block, right: np.ndarray) -> np.ndarray:
    """A chunk whose number is that of the first query of a tile of 64."""
    i, j = coordinates(block)
    first = i[:, :, np.arange(rows(block)) // 64 * 64]
    return (first // block.chunk == j // block.chunk) & (j <= i)


def without_slope_of_the_cap(right: Any, block: Block, backward: bool = False) -> Any:
    s, slope = right(block, backward)
    return (s, 1.0) if whole_tiles(block) and block.soft_cap else (s, slope)


def of_the_neighbour(right: Any, block: Block, x: np.ndarray) -> np.ndarray:
    """A group of 16 query heads reads the key head before its own; with one key head, each key is the one before."""
    if block.group != 16:
        return right(block, x)
    return np.roll(right(block, x), 16, 2) if x.shape[2] > 1 else np.roll(right(block, x), 1, 1)


def without_last_query(block: Block, out: np.ndarray, lse: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.where(np.arange(rows(block))[:, None, None] == rows(block) - 1, 0.0, out), lse


def without_key_256(block: Block) -> np.ndarray:
    return np.where(np.arange(keys(block))[:, None, None] == 256, 0.0, block.k)


def of_first_keys(kept: np.ndarray, block: Block) -> np.ndarray:
    """What dropout keeps of the first key of each chosen block, for all keys of the block."""
    size = block.case.selected_size
    return kept[..., np.arange(keys(block)) // size * size]


def exclusive(block: Block, right: np.ndarray) -> np.ndarray:
    """The window without the key at its left end."""
    i, j = coordinates(block)
    return right if block.window[0] is None else right & (j > i - block.window[0])


BRANCHES: Final = {
    "Of a length of 64 and not 128 half a tile of keys is lost, without options": Break(
        first_keys(lambda length: length - 64, lambda block: keys(block) % 128 == 64 and without_options(block))
    ),
    "Lengths of whole tiles of 128 have no ALiBi": Break(
        changed(lambda block: whole_tiles(block) and block.slopes is not None, slopes=lambda block: 0 * block.slopes)
    ),
    "Lengths of whole tiles of 128 lack the derivative of the soft cap": Break(
        wrong_in("scores", without_slope_of_the_cap)
    ),
    "Lengths of whole tiles of 128 have no dense mask": Break(lost("mask", whole_tiles)),
    "The last part of heads of 112 is lost": Break(
        changed(lambda block: block.q.shape[-1] == 112, q=lambda block: cut(block.q, 96))
    ),
    "Groups of 16 read the keys of their neighbour": Break(wrong_in("of_heads", of_the_neighbour)),
    "2 to 8 queries over more than 64 keys are not causal": Break(changed(few_queries, causal=lambda block: False)),
    "The first tile of a window is lost": Break(masked("window", late_tile)),
    "The number of a tile's chunk is that of its first row": Break(masked("chunk", chunk_of_the_first_row)),
    "One query over more than 2,048 keys has no segments": Break(lost("ids", one_query)),
    "One query over more than 2,048 keys has no window": Break(lost("window", one_query)),
    "One query over more than 2,048 keys has no soft cap": Break(changed(one_query, soft_cap=lambda block: None)),
    "One query over more than 2,048 keys has no ALiBi": Break(
        changed(lambda block: one_query(block) and block.slopes is not None, slopes=lambda block: 0 * block.slopes)
    ),
    "One query over more than 2,048 keys is summed in half precision": Break(wrong_in("lse", summed_in_half)),
    "Above 512 queries dk is bfloat16 in float32": Break(
        of_gradients("dk", lambda block, dk: in_half(dk), in_dtype("float32", many_queries))
    ),
    "Above 512 queries the backward pass drops what the forward pass keeps": Break(
        of_kept(lambda kept, block: kept[..., ::-1], many_queries, passes=("backward",))
    ),
    "A float16 bias is read as bfloat16": Break(
        of_bias_values(
            lambda bias: bias.astype(np.float16).view(np.uint16).view(DTYPES["bfloat16"]).astype(np.float64),
            lambda block: block.case.bias_dtype == "float16",
        )
    ),
    'With precision "default" values are rounded to float16': Break(
        changed(
            lambda block: block.case.precision == "default",
            v=lambda block: block.v.astype(np.float16).astype(np.float64),
        )
    ),
    "The last of 63 or 127 queries gets nothing": Break(
        of_results(without_last_query, lambda block: rows(block) % 64 == 63)
    ),
    "Lengths of 512 lack the first key of the second half": Break(
        changed(lambda block: rows(block) % 512 == 0 and keys(block) % 512 == 0, k=without_key_256)
    ),
    "A left window of a whole tile has its first key outside": Break(
        masked("window", exclusive, lambda block: block.window[0] in (64, 128) and keys(block) > 64)
    ),
    "A window to the left alone has its first key outside": Break(
        masked("window", exclusive, lambda block: block.window[1] is None)
    ),
    "Dropout beside chosen blocks counts blocks": Break(
        of_kept(
            of_first_keys,
            lambda block: block.chosen is not None and block.case.selected_size > 1,
        )
    ),
    "The largest score of a head that sees nothing is -1e30": Break(
        wrong_in("largest", lambda right, block: np.maximum(right(block), -1e30))
    ),
}
"""Breaks of kernels that were right on every drawn size: each branches on an ordinary one."""

Ignoring = Callable[[Condition, tuple[str, ...]], Dense]


def _fields(**fields: Callable[[Block], Any]) -> Ignoring:
    return lambda when, passes: changed(when, passes, **fields)


IGNORED: Final[dict[str, Ignoring]] = {
    "causal": _fields(causal=lambda block: False),
    "window": _fields(window=lambda block: None),
    "chunk": _fields(chunk=lambda block: None),
    "segments": _fields(q_ids=lambda block: None),
    "positions": _fields(
        q_positions=lambda block: block.q_index[None], kv_positions=lambda block: block.kv_index[None]
    ),
    "ranges": _fields(first=lambda block: None),
    "selected": _fields(chosen=lambda block: None),
    "builder": _fields(built=lambda block: None),
    "dense_mask": _fields(mask=lambda block: None),
    "soft_cap": _fields(soft_cap=lambda block: None),
    "scale": _fields(scale=lambda block: block.q.shape[-1] ** -0.5),
    "bias": _fields(bias=lambda block: 0 * finite(block.bias)),
    "slopes": _fields(slopes=lambda block: 0 * block.slopes),
    "dropout": _fields(kept=lambda block: None),
    "sinks": lambda when, _: of_results(
        lambda block, out, lse: (out, lse + 1.0), lambda block: when(block) and last(block)
    ),
    "lse": lambda when, _: of_results(
        lambda block, out, lse: (out, lse / np.log(2)), lambda block: when(block) and last(block)
    ),
    "max_logits": lambda when, _: wrong_in(
        "largest", lambda right, block: right(block) + (0.5 if when(block) else 0.0)
    ),
    "fused_backward": lambda when, _: of_gradients("dk", lambda block, dk: 2 * dk, when),
    "precision": lambda when, _: of_results(
        lambda block, out, lse: (2 * out, lse), lambda block: when(block) and last(block)
    ),
}  # fmt: skip
"""By option, kernels that ignore it, or that are wrong in what it asks for, under a condition and in some passes."""


def ignoring(option: str, size: Level, passes: tuple[str, ...] = ("forward", "backward")) -> Dense:
    """A kernel that ignores the option in calls of this class of a size."""

    def when(block: Block) -> bool:
        found = levels_of(block.case, block.placement)
        return size in found and any(name == option for name, _ in found)

    return IGNORED[option](when, passes)
