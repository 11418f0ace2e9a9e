# SPDX-License-Identifier: Apache-2.0
"""A block as a problem of the oracle, for whole sequences whose indices begin at 0."""

import numpy as np
from ringattn_conformance.oracle import Problem
from ringattn_core.contract.protocol import Block


def problem_of(block: Block) -> Problem:
    """The same scores, masks and dropout. Slopes and seed must be equal in all batch rows."""
    rule = block.rule
    q_segments, kv_segments, bias = (
        None if x is None else np.asarray(x) for x in (block.q_segments, block.kv_segments, block.bias)
    )
    return Problem(
        q=_exact(block.q), k=_exact(block.k), v=_exact(block.v),
        causal=rule.causal, window=rule.sliding_window, chunk=rule.chunk_size,
        q_segments=q_segments, kv_segments=kv_segments,
        q_positions=np.asarray(block.q_positions), kv_positions=np.asarray(block.kv_positions),
        seen=_dense_masks(block), soft_cap=rule.logits_soft_cap, scale=rule.softmax_scale, bias=bias,
        slopes=None if block.slopes is None else np.asarray(block.slopes)[0],
        dropout=rule.dropout_prob, seed=0 if block.seed is None else int(block.seed[0]),
    )  # fmt: skip


def _exact(x: object) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _dense_masks(block: Block) -> np.ndarray | None:
    """The masks of heads and the dense mask together."""
    rule, dense = block.rule, None if block.mask is None else np.asarray(block.mask)
    if not rule.masks:
        return dense
    of_head = [rule.masks[number].held.array for number in rule.mask_of_head]  # pyright: ignore[reportAttributeAccessIssue]
    return np.stack(of_head)[None] & (True if dense is None else dense)
