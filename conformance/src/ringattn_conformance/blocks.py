# SPDX-License-Identifier: Apache-2.0
"""Blocks for kernels that are tested without a ring: those of a case, and any of random numbers."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, get_args

import jax.numpy as jnp
import numpy as np
from ringattn_core.config import BwdParams, FwdParams
from ringattn_core.contract import packing
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.rule import Rule
from ringattn_core.masks.builder import build
from ringattn_core.placement.arrays import axes_with

from .cases import Case, Inputs
from .ranks import static_options

_OF_RULE: Final = frozenset(field.name for field in dataclasses.fields(Rule))
_OPTIONAL: Final = tuple(
    field.name for field in dataclasses.fields(Block) if type(None) in get_args(field.type) and field.name != "shift"
)
"""The arrays of a block that only some calls have."""
_KEYS: Final = axes_with(Block, "S")


def make_block(
    batch: int = 2, q_length: int = 7, kv_length: int = 7, heads: int = 2, kv_heads: int | None = None, dim: int = 8,
    value_dim: int | None = None, dtype: Any = jnp.float32, draw_seed: int = 0,
    params: Mapping[str, Any] | None = None, offset: int = 0, **fields: Any,
) -> Block:  # fmt: skip
    """A block of random numbers, zero where an id is negative; the keys have the indices from `offset` on.

    `params` are the tile sizes of both passes. Other names are fields of `Rule` or of `Block`.
    """
    draw, kv_heads, value_dim = np.random.default_rng(draw_seed), kv_heads or heads, value_dim or dim
    shapes = ((q_length, heads, dim), (kv_length, kv_heads, dim), (kv_length, kv_heads, value_dim))
    q_ids, kv_ids = fields.get("q_segments"), fields.get("kv_segments")
    q, k, v = (
        jnp.asarray(without_padding(draw.normal(size=(batch, *shape)), ids), dtype)
        for shape, ids in zip(shapes, (q_ids, kv_ids, kv_ids), strict=True)
    )
    sizes = {"fwd_params": FwdParams(**(params or {})), "bwd_params": BwdParams(**(params or {}))}
    rule = Rule(**{"scale": dim**-0.5, **sizes, **{name: x for name, x in fields.items() if name in _OF_RULE}})
    index, kv_index = np.arange(q_length, dtype=np.int32)[None], np.arange(kv_length, dtype=np.int32)[None] + offset
    given: dict[str, Any] = {
        "kv": packing.pack(k, v),
        "q_positions": index, "kv_positions": kv_index, "q_index": index, "kv_index": kv_index,
        "batch_index": np.arange(batch, dtype=np.int32), "head_index": np.arange(heads, dtype=np.int32),
        **dict.fromkeys(_OPTIONAL),
        **{name: x for name, x in fields.items() if name not in _OF_RULE},
    }  # fmt: skip
    plain = (bool, tuple, type(None))
    fields = {name: x if isinstance(x, plain) else jnp.asarray(x) for name, x in given.items()}
    return Block(q=q, rule=rule, **fields)


def random_ids(batch: int, length: int) -> np.ndarray:
    """Segment ids `[batch, length]` of packed documents, others in each row; the last fifth is padding (-1)."""
    found = np.sort(np.random.default_rng(length).integers(0, 3, (batch, length)), -1)
    found[:, length - length // 5 :] = -1
    return found.astype(np.int32)


def random_mask(*shape: int) -> np.ndarray:
    """A dense mask that is true in three of five places."""
    return np.random.default_rng(3).random(shape) < 0.6


def without_padding(x: np.ndarray, ids: np.ndarray | None) -> np.ndarray:
    """`[B, T, ...]` with zeros where the id is negative, as core hands arrays to kernels."""
    return x if ids is None else np.where((ids >= 0).reshape(*ids.shape, *[1] * (x.ndim - 2)), x, np.zeros((), x.dtype))


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
    k, v = without_padding(problem.k, kv_ids), without_padding(problem.v, kv_ids)
    kv = np.stack([k, v]) if k.shape == v.shape else np.concatenate([k, v], -1)
    rule = rule_of(case, rows, columns)

    optional = {name: getattr(problem, name, None) for name in _OPTIONAL} | {
        "q_segments": q_ids, "kv_segments": kv_ids, "mask": inputs.dense_mask,
        "seed": np.full((case.batch,), problem.seed, np.uint32) if problem.dropout else None,
    }  # fmt: skip
    given = {name: x if x is None or name == "seed" else np.atleast_2d(x) for name, x in optional.items()} | {
        "q": without_padding(problem.q, q_ids), "kv": kv, "q_positions": q_positions, "kv_positions": kv_positions,
        "q_index": np.arange(rows, dtype=np.int32)[None], "kv_index": np.arange(columns, dtype=np.int32)[None],
        "batch_index": np.arange(case.batch, dtype=np.int32), "head_index": np.arange(case.heads, dtype=np.int32),
    }  # fmt: skip
    split_along = _KEYS | {"kv": kv.ndim - 3}

    def part(name: str, shard: int) -> Any:
        x = given[name]
        x = np.split(x, shards, split_along[name])[shard] if x is not None and name in split_along else x
        return None if x is None else jnp.asarray(x)

    return [Block(rule=rule, **{name: part(name, shard) for name in given}) for shard in range(shards)]


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
