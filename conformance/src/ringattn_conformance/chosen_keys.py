# SPDX-License-Identifier: Apache-2.0
"""Ids of chosen keys or blocks of keys, by the names in `cases.json`."""

from collections.abc import Callable
from typing import Final

import numpy as np

from .oracle import Problem

Choose = Callable[[Problem, int, int], np.ndarray]
"""Takes a problem, the number of groups and the number of keys of a block; returns ids `[B, T, groups, n]`."""


def _blocks(problem: Problem, size: int) -> int:
    return -(-problem.k.shape[1] // size)


def scattered(problem: Problem, groups: int, size: int) -> np.ndarray:
    """Blocks here and there, in no order, repeated ones, -1 and blocks after the query among them.

    Every seventh query chooses none; batch rows and groups differ.
    """
    (batch, rows), blocks = problem.q.shape[:2], _blocks(problem, size)
    count = max(min(blocks // 2, 9), 2)
    b, i, g, n = np.ogrid[:batch, :rows, :groups, :count]
    ids = (7 * i + 5 * b + 3 * g + (11 + 2 * g) * n + i * n // 3) % blocks
    ids = np.where((n == 1) & (i % 4 == 0), ids[..., :1], ids)
    empty = (i + b) % 7 == 3
    return np.where(empty | ((n == 0) & (i % 5 == 1)), -1, ids).astype(np.int32)


def newest(problem: Problem, groups: int, size: int) -> np.ndarray:
    """The first block, and the blocks up to the query's own, as in models that always choose these.

    A later group looks further back.
    """
    (batch, rows), blocks = problem.q.shape[:2], _blocks(problem, size)
    b, i, g, n = np.ogrid[:batch, :rows, :groups, :4]
    own = np.minimum(i * blocks // max(rows, 1), blocks - 1)
    ids = np.where(n == 0, 0, own - (n - 1) * (1 + g))
    return np.where(ids < 0, -1, ids + 0 * b).astype(np.int32)


def of_others(problem: Problem, groups: int, size: int) -> np.ndarray:
    """Each group chooses its own share of the blocks, in descending order: with another group's ids no key is right."""
    (batch, rows), blocks = problem.q.shape[:2], _blocks(problem, size)
    count = -(-blocks // groups)
    b, i, g, n = np.ogrid[:batch, :rows, :groups, :count]
    ids = groups * (count - 1 - n) + g
    return np.where((ids >= blocks) | ((i + n + b) % 6 == 5), -1, ids).astype(np.int32)


def few(problem: Problem, groups: int, size: int) -> np.ndarray:
    """Every query chooses two of three blocks: the first, one in the middle and the last. Nobody sees other keys."""
    (batch, rows), blocks = problem.q.shape[:2], _blocks(problem, size)
    b, i, g, n = np.ogrid[:batch, :rows, :groups, :2]
    known = np.array([blocks - 1, 0, blocks // 2])
    return known[(i + n + g + 0 * b) % 3].astype(np.int32)


SELECTED: Final[dict[str, Choose]] = {
    "scattered": scattered, "newest": newest, "of-others": of_others, "few": few,
}  # fmt: skip
