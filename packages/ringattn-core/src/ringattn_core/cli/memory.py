# SPDX-License-Identifier: Apache-2.0
"""What one device holds: the arrays of the call, and those of the engine at its busiest hop."""

from typing import Any

import jax
import jax.numpy as jnp

from ..contract import packing
from ..contract.features import Feature
from ..contract.protocol import Partial
from ..ring.blocks import Differentiable, block
from ..ring.hops import Plan
from .explanation import Held
from .tracing import Shard


def elements(shard: Shard) -> int:
    """Those of a shard's packed K,V."""
    return _packed(shard.inputs).size


def held(shard: Shard) -> tuple[Held, ...]:
    """Each array once. A kernel's own workspace, and what a compiler copies or lets share, is not in it."""
    inputs, plan = shard.inputs, shard.ring.plan
    size, itemsize = elements(shard), inputs.k.dtype.itemsize
    partial = jax.eval_shape(_partial, shard)
    keys, gradients = size * itemsize, 4 * size
    sent = _sent_at_once(plan, size, itemsize)
    dq, dbias = 4 * inputs.q.size, 0 if inputs.bias is None else 4 * inputs.bias.size
    fixed, lse = shard.fixed, _bytes(partial.lse)
    ids = _bytes((fixed.q_segments, fixed.q_positions)) + plan.ranks * _bytes((fixed.kv_segments, fixed.kv_positions))
    with_lse = Feature.RETURN_LSE in shard.needs
    found = [
        Held("call", "inputs", _bytes(inputs)),
        Held("call", "ids and positions, those of all keys", ids),
        Held("call", "output and lse" if with_lse else "output", partial.out.size * itemsize + lse * with_lse),
        Held("forward", "K,V at work, and K,V that arrive" if plan.shifts else "K,V", keys * (2 if plan.shifts else 1)),
        Held("forward", "partial output and lse, float32", _bytes(partial)),
        Held("backward", "what is sent at once, going and coming", 2 * sent) if sent else Held("backward", "K,V", keys),
        Held("backward", "dk, dv of the hop, float32", gradients),
        Held("backward", "dk, dv of half of the own heads", plan.halves(inputs.k.shape[2]) * gradients // 2),
        Held("backward", "dq, float32", dq),
        Held("backward", "dbias, float32", dbias),
        Held("backward", "output, lse, delta kept", partial.out.size * itemsize + 2 * lse),
    ]
    return tuple(entry for entry in found if entry.bytes)


def _sent_at_once(plan: Plan, size: int, itemsize: int) -> int:
    """The bytes that travel during the hop of the backward that sends most; on both ways together."""
    onward, behind = (*plan.shifts[1:], None), (None, *plan.shifts[1:])
    hops = [plan.parcel(None, plan.homeward), plan.parcel(next(iter(plan.shifts), None), None)]
    hops += [plan.parcel(*moves) for moves in zip(onward, behind, strict=True)]
    return max(sum(send.bytes(size, itemsize) for send in sends) for sends in hops)


def _packed(inputs: Differentiable) -> jax.ShapeDtypeStruct:
    return jax.eval_shape(packing.pack, inputs.k, inputs.v)


def _partial(shard: Shard) -> Any:
    alone = block(shard.ring, shard.inputs, (shard.inputs.k, shard.inputs.v), shard.fixed, 0)
    batch, length, heads = alone.q.shape[:3]
    out, lse = (batch, length, heads, alone.value_dim), (batch, heads, length)
    return Partial(jnp.zeros(out, jnp.float32), jnp.zeros(lse, jnp.float32))


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
