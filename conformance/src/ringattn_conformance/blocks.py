# SPDX-License-Identifier: Apache-2.0
"""How a case becomes blocks, for kernels that are tried without any ring."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.rule import Rule
from ringattn_core.masks.builder import build

from .cases import Case, Inputs
from .ranks import static_options


def sinkless(case: Case) -> Case:
    """The case as a kernel sees it: sinks are not its business."""
    return dataclasses.replace(case, sinks=None, no_sink=False)


def blocks_of(case: Case, inputs: Inputs, shards: int) -> list[Block]:
    """All queries against each of `shards` equal shards of the keys."""
    problem = inputs.problem
    rows, columns = problem.q.shape[1], problem.k.shape[1]
    q_positions, kv_positions = (
        np.atleast_2d(np.arange(length) if x is None else x).astype(np.int32)
        for x, length in ((problem.q_positions, rows), (problem.kv_positions, columns))
    )
    q_ids, kv_ids = problem.q_segments, problem.kv_segments
    q_ids, kv_ids = (kv_ids if q_ids is None else q_ids), (q_ids if kv_ids is None else kv_ids)
    kv = (
        np.stack([problem.k, problem.v])
        if problem.k.shape == problem.v.shape
        else np.concatenate([problem.k, problem.v], -1)
    )
    rule = rule_of(case, rows, columns)

    def part(x: np.ndarray | None, axis: int, shard: int) -> jnp.ndarray | None:
        return None if x is None else jnp.asarray(np.split(x, shards, axis)[shard])

    def whole(x: np.ndarray | None) -> jnp.ndarray | None:
        return None if x is None else jnp.asarray(x)

    return [
        Block(
            q=jnp.asarray(problem.q),
            kv=jnp.asarray(np.split(kv, shards, kv.ndim - 3)[shard]),
            q_positions=jnp.asarray(q_positions),
            kv_positions=jnp.asarray(np.split(kv_positions, shards, 1)[shard]),
            q_index=jnp.arange(rows, dtype=jnp.int32)[None],
            kv_index=jnp.arange(columns, dtype=jnp.int32)[None].reshape(1, shards, -1)[:, shard],
            batch_index=jnp.arange(case.batch, dtype=jnp.int32),
            head_index=jnp.arange(case.heads, dtype=jnp.int32),
            q_segments=whole(q_ids),
            kv_segments=part(kv_ids, 1, shard),
            bias=part(problem.bias, 3, shard),
            mask=part(inputs.dense_mask, 3, shard),
            slopes=None if problem.slopes is None else jnp.asarray(problem.slopes)[None],
            seed=jnp.full((case.batch,), problem.seed, jnp.uint32) if problem.dropout else None,
            rule=rule,
        )
        for shard in range(shards)
    ]


def rule_of(case: Case, rows: int, columns: int) -> Rule:
    """The static half of the case's blocks."""
    window = case.window if isinstance(case.window, tuple | None) else (case.window, case.window)
    built = None
    if case.builder is not None:
        built = build(case.builder.build, rows, columns, case.heads, case.kv_heads)
    config = static_options(case).get("cfg")
    return Rule(
        scale=case.head_dim**-0.5 if case.scale is None else case.scale,
        causal=case.causal,
        window=window,
        chunk=case.chunk,
        soft_cap=case.soft_cap,
        dropout=case.dropout,
        masks=built.masks if built else (),
        mask_of_head=built.of_head if built else (),
        increasing=case.positions is None,
        fused_backward=case.fused_backward,
        **({"fwd_params": config.fwd_params, "bwd_params": config.bwd_params} if config else {}),
    )
