# SPDX-License-Identifier: Apache-2.0
"""Blocks of random numbers, for the tests of kernels without a ring."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final, get_args

import jax
import jax.numpy as jnp
import numpy as np
from ringattn_core.config import BwdParams, FwdParams
from ringattn_core.contract import bits, packing
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.rule import Rule
from ringattn_core.contract.visibility import intervals
from ringattn_core.masks import Coordinates, Interval, Mask, Reach
from ringattn_core.masks.builder import Built

_OF_RULE: Final = frozenset(field.name for field in dataclasses.fields(Rule))
_SEEN: Final = (
    "causal", "sliding_window", "chunk_size", "kv_range", "masks", "mask_of_head", "mask", "selected", "selected_size",
)  # fmt: skip
"""The options of a call that say what a query sees."""
_OPTIONAL: Final = tuple(field.name for field in dataclasses.fields(Block) if type(None) in get_args(field.type))
"""The arrays of a block that only some calls have."""


def make_block(
    batch: int = 2, q_length: int = 7, kv_length: int = 7, heads: int = 2, kv_heads: int | None = None, dim: int = 8,
    value_dim: int | None = None, dtype: Any = jnp.float32, draw_seed: int = 0,
    params: Mapping[str, Any] | None = None, offset: int = 0, **fields: Any,
) -> Block:  # fmt: skip
    """A block of random numbers; the keys have the indices from `offset` on.

    `params` are the tile sizes of both passes. `causal`, `sliding_window`, `chunk_size`, `kv_range`, `masks`,
    `mask_of_head`, the dense `mask`, `selected` and `selected_size` say what a query sees, as in a call: they become
    `first`, `last` and bits. Other names are fields of `Rule` or of `Block`.
    """
    draw, kv_heads, value_dim = np.random.default_rng(draw_seed), kv_heads or heads, value_dim or dim
    shapes = ((q_length, heads, dim), (kv_length, kv_heads, dim), (kv_length, kv_heads, value_dim))
    q, k, v = (jnp.asarray(draw.normal(size=(batch, *shape)), dtype) for shape in shapes)
    sizes = {"fwd_params": FwdParams(**(params or {})), "bwd_params": BwdParams(**(params or {}))}
    rule = Rule(**{"softmax_scale": dim**-0.5, **sizes, **{name: x for name, x in fields.items() if name in _OF_RULE}})
    index, kv_index = np.arange(q_length, dtype=np.int32)[None], np.arange(kv_length, dtype=np.int32)[None] + offset
    given: dict[str, Any] = {
        "kv": packing.pack(k, v),
        "q_positions": index, "kv_positions": kv_index, "q_index": index, "kv_index": kv_index,
        "batch_index": np.arange(batch, dtype=np.int32), "head_index": np.arange(heads, dtype=np.int32),
        **dict.fromkeys(_OPTIONAL),
        **{name: x for name, x in fields.items() if name not in (*_OF_RULE, *_SEEN)},
    }  # fmt: skip
    plain = (bool, tuple, type(None), Reach)
    given = {name: x if isinstance(x, plain) else jnp.asarray(x) for name, x in given.items()}
    block = Block(q=q, rule=rule, **given)
    return seeing(block, **{name: x for name, x in fields.items() if name in _SEEN})


def seeing(
    block: Block, causal: bool = False, sliding_window: Any = None, chunk_size: int | None = None, kv_range: Any = None,
    masks: tuple[Mask, ...] = (), mask_of_head: tuple[int, ...] = (), mask: Any = None,
    selected: Any = None, selected_size: int = 1,
) -> Block:  # fmt: skip
    """The block in which queries see what these options of a call let them see. `kv_range` is a pair `[b, n, T]`.

    Ids in `selected` count blocks of the keys of this block.
    """
    q, kv = Coordinates(block.q_positions, block.q_index), Coordinates(block.kv_positions, block.kv_index)
    reach = Reach(causal, *(sliding_window or (None, None)), chunk_size)
    natural = all(x is y or bool((np.asarray(x) == np.asarray(y)).all()) for x, y in (q, kv))
    built = Built(masks, mask_of_head or (0,) * block.q.shape[2])
    given = Interval(*(None if kv_range is None else jnp.asarray(end, jnp.int32) for end in kv_range or (None, None)))
    sees = intervals(reach, built, given, q, block.head_index, natural)
    of_head = jnp.asarray(built.of_head, jnp.int32)[block.head_index]
    of_masks = bits.of_masks(sees.masks, of_head, None if mask is None else jnp.asarray(mask), q, kv)
    chosen = None
    if selected is not None:
        ids = np.swapaxes(np.asarray(selected, np.int32), 1, 2)
        chosen = bits.Bits(_bits_of_numbers(ids, -(-block.kv_length // selected_size)), None, selected_size)
    seen = bits.both(of_masks, chosen, block.q.shape[2], block.kv_length)
    words, bits_of_head, grain = (None, None, 1) if seen is None else seen
    return dataclasses.replace(
        block, first=sees.first, last=sees.last, bits=words, bits_of_head=bits_of_head, grain=grain, reach=reach,
        monotone=natural and sees.monotone,
    )  # fmt: skip


_bits_of_numbers = jax.jit(bits.of_numbers, static_argnums=1)
"""One program; called as it is, `of_numbers` would compile a program for each of its operations."""


def random_ids(batch: int, length: int) -> np.ndarray:
    """Segment ids `[batch, length]` of packed documents, others in each row; the last fifth is padding (-1)."""
    found = np.sort(np.random.default_rng(length).integers(0, 3, (batch, length)), -1)
    found[:, length - length // 5 :] = -1
    return found.astype(np.int32)


def random_mask(*shape: int) -> np.ndarray:
    """A dense mask that is true in three of five places."""
    return np.random.default_rng(3).random(shape) < 0.6
