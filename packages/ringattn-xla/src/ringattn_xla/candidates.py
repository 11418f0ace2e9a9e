# SPDX-License-Identifier: Apache-2.0
"""Which tile sizes are worth measuring."""

from typing import Final

from ringattn_core.config import BwdParams, FwdParams, RingAttentionConfig
from ringattn_core.tuning import Problem

from .tiling import near_equal

_Q_TILES: Final = (64, 128, 256, 512, 1024)
_KV_TILES: Final = (128, 256, 512)
_MOST_SCORES: Final = 2**18
"""Of one key head in one step: beyond, products gain nothing, and memory grows."""


def candidate_configs(problem: Problem) -> list[RingAttentionConfig]:
    """One for each way in which such sizes cut the block; the largest is for blocks that none of them cuts."""
    group = problem.heads // problem.kv_heads
    found: dict[tuple[int, int], RingAttentionConfig] = {}
    for q in _Q_TILES:
        for kv in _KV_TILES:
            cut = near_equal(problem.q_length, q), near_equal(problem.kv_length, kv)
            if cut[0] * cut[1] * group <= _MOST_SCORES and cut not in found:
                found[cut] = RingAttentionConfig(FwdParams(q, kv), BwdParams(q, kv))
    return list(found.values())
