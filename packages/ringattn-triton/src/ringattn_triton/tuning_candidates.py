# SPDX-License-Identifier: Apache-2.0
"""Which tile sizes, warps and pipeline stages the tuner measures."""

from typing import Final

import jax.numpy as jnp
from ringattn_core import RingAttentionConfig
from ringattn_core.tuning import Problem

from .kernel_inputs import padded_dim

Tiles = tuple[tuple[int, int, int], ...]
"""Tuples `(queries, keys, warps)`: the tile sizes and warps of a program. The first tuples keep tensor cores busiest,
the last need the fewest registers."""

_FORWARD: Final[Tiles] = ((128, 128, 8), (128, 64, 8), (128, 64, 4), (64, 128, 4), (64, 64, 4), (128, 32, 4))
_BACKWARD_KEYS: Final[Tiles] = ((64, 128, 8), (64, 64, 4), (32, 128, 8), (32, 64, 4))
_BACKWARD_QUERIES: Final[Tiles] = ((128, 64, 8), (64, 64, 4), (128, 32, 8), (64, 32, 4))
_FORWARD_FLOAT32: Final[Tiles] = ((128, 64, 8), (64, 32, 4), (32, 64, 4), (64, 16, 8), (32, 16, 8))
_BACKWARD_KEYS_FLOAT32: Final[Tiles] = ((64, 32, 4), (32, 32, 4), (16, 64, 8), (16, 32, 8), (16, 16, 8))
_BACKWARD_QUERIES_FLOAT32: Final[Tiles] = ((32, 64, 4), (64, 16, 8), (32, 16, 8), (16, 16, 8))
_STAGES: Final = (2, 3)


def candidate_configs(problem: Problem) -> list[RingAttentionConfig]:
    """The schedules to measure: all whose tiles are no longer than the block; none on a CPU (interpreted kernels).

    A schedule that does not fit the device fails when it is tried, or is compiled with fewer stages. The backward pass
    has a kernel that owns keys and a kernel that owns queries: each schedule of one is combined with each schedule of
    the other with equally many stages.
    """
    if problem.platform == "cpu":
        return []
    narrow = jnp.dtype(problem.dtype).itemsize < 4
    forward = _schedules(problem, _FORWARD if narrow else _FORWARD_FLOAT32)
    keys = _schedules(problem, _BACKWARD_KEYS if narrow else _BACKWARD_KEYS_FLOAT32)
    queries = _schedules(problem, _BACKWARD_QUERIES if narrow else _BACKWARD_QUERIES_FLOAT32)
    found = [RingAttentionConfig(fwd_params=sizes) for sizes in forward]
    for own in keys:
        for sizes in queries:
            if sizes["num_stages"] == own["num_stages"]:
                extra = {f"dq_{name}": value for name, value in sizes.items()}
                found.append(RingAttentionConfig(bwd_params={**own, "extra": extra}))
    return found


def _schedules(problem: Problem, tiles: Tiles) -> list[dict[str, int]]:
    q_longest, kv_longest = padded_dim(problem.q_length), padded_dim(problem.kv_length)
    return [
        {"q_blocksize": q, "kv_blocksize": kv, "num_warps": warps, "num_stages": stages}
        for q, kv, warps in tiles
        if q <= q_longest and kv <= kv_longest
        for stages in _STAGES
    ]
