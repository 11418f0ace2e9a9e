# SPDX-License-Identifier: Apache-2.0
"""Which tile sizes the tuner measures."""

from typing import Final

from ringattn_core import BwdParams, FwdParams, RingAttentionConfig
from ringattn_core.tuning import Problem

from . import steps
from .block_sizes import cut

_TILES: Final = (256, 512, 1024, 2048)
_PARTS: Final = (256, 512, 1024)
_MOST_SCORES: Final = 2**20
"""The most scores of a tile: the arrays of a step with more would not fit vector memory."""


def candidate_configs(problem: Problem) -> list[RingAttentionConfig]:
    """The configurations that the tuner times: tile sizes, and the part of a tile that is computed at a time.

    Sizes that cut the block into the same tiles and parts come only once.
    """
    found: dict[tuple[int, ...], RingAttentionConfig] = {}
    for q in _TILES:
        for kv in _TILES:
            (q_tile, q_length), (kv_tile, kv_length) = cut(problem.q_length, q), cut(problem.kv_length, kv)
            shape = problem.batch, q_length // q_tile, kv_length // kv_tile
            if q_tile * kv_tile > _MOST_SCORES or not steps.fits(*shape):
                continue
            for part in sorted({min(size, q_tile, kv_tile) for size in _PARTS}):
                sizes = {"q_blocksize": q, "kv_blocksize": kv, "extra": (("part", part),)}
                found.setdefault((q_tile, kv_tile, part), RingAttentionConfig(FwdParams(**sizes), BwdParams(**sizes)))
    return list(found.values())
