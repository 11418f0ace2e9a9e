# SPDX-License-Identifier: Apache-2.0
"""Which tile sizes the tuner measures."""

from typing import Final

from ringattn_core import BwdParams, FwdParams, RingAttentionConfig
from ringattn_core.tuning import Problem

from .tiling import cut, longest

_ROWS: Final = (64, 128, 256, 512, 1024)
"""Candidate numbers of rows of a tile in a matrix product: its queries times the heads of a group."""
_SHORTEST: Final = 16
_KV_TILES: Final = (128, 256, 512)
_MOST_SCORES: Final = 2**18
"""The most scores of one key head in one step. Larger tiles make products no faster and need more memory."""


def candidate_configs(problem: Problem) -> list[RingAttentionConfig]:
    """Tile sizes to measure: one configuration for each way to cut the block, except the kernel's default way."""
    group = problem.heads // problem.kv_heads
    own = longest(problem.reach.span, group)
    alike = cut(problem.q_length, own[0]), cut(problem.kv_length, own[1])
    found: dict[tuple[int, int], RingAttentionConfig] = {}
    for q in (max(rows // group, _SHORTEST) for rows in _ROWS):
        for kv in _KV_TILES:
            sizes = cut(problem.q_length, q), cut(problem.kv_length, kv)
            if sizes[0] * sizes[1] * group <= _MOST_SCORES and sizes not in (alike, *found):
                found[sizes] = RingAttentionConfig(FwdParams(q, kv), BwdParams(q, kv))
    return list(found.values())
