# SPDX-License-Identifier: Apache-2.0
"""What is compiled for TPUs that nobody needs to have: whole rings, and blocks that depend on everything at once.

Each function is given the devices of a topology and says what to lower: a function, and shapes that know their devices.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import ringattn_tpu
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ringattn_core import ring_mesh
from ringattn_core.contract.bits import words_of
from ringattn_core.contract.protocol import Block, Partial
from ringattn_core.contract.rule import Rule
from ringattn_core.masks import Reach
from ringattn_tpu.block import KERNEL

CHIPS: Final = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
"""The topology of a host of each chip; that of 7x has two devices on each chip."""

Program = tuple[Callable[..., Any], tuple[Any, ...]]


def ring(devices: Sequence[Any], length: int, heads: int, backward: bool = False) -> Program:
    """A causal ring over all devices, each with `length` tokens in bfloat16; with `backward` also its gradients."""
    mesh = ring_mesh(devices)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return ringattn_tpu.ring_attention(q, k, v, axis_name="sp", causal=True)

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp"))

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        out, pullback = jax.vjp(sharded, q, k, v)
        return out, pullback(dout)

    tokens = _tokens(mesh, length, heads)
    return (gradients, (tokens,) * 4) if backward else (sharded, (tokens,) * 3)


def _tokens(mesh: Mesh, length: int, heads: int) -> jax.ShapeDtypeStruct:
    """Heads of 128 in bfloat16, for so many tokens of each device."""
    shape = (1, length * mesh.size, heads, 128)
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(None, "sp")))


def block(devices: Sequence[Any], length: int, heads: int) -> Program:
    """A causal block in bfloat16 on one device, forward and backward."""
    last = _on(devices[0])(1, 1, length)
    rule = Rule(softmax_scale=128**-0.5)
    return _both(_block(devices[0], (1, length, heads, 128), rule, last=last, reach=Reach(causal=True), monotone=True))


def from_sinks(devices: Sequence[Any], length: int, heads: int) -> Program:
    """The forward pass of a causal block in bfloat16 that begins from sinks and returns the largest scores."""
    put, rule = _on(devices[0]), Rule(softmax_scale=128**-0.5, return_max_logits=True)
    causal = {"last": put(1, 1, length), "reach": Reach(causal=True), "monotone": True}
    lse = put(1, heads, length, dtype=jnp.float32)
    return KERNEL.forward, (_block(devices[0], (1, length, heads, 128), rule, **causal), Partial(None, lse, lse))


def serial(devices: Sequence[Any], length: int, heads: int) -> Program:
    """What a ring must not be: the kernel of a hop waits for the keys that the hop brings."""
    mesh = ring_mesh(devices)

    def attend(q: jax.Array, kv: jax.Array) -> jax.Array:
        kv = jax.lax.ppermute(kv, "sp", [(rank, (rank + 1) % mesh.size) for rank in range(mesh.size)])
        return ringattn_tpu.ring_attention(q, kv, kv, axis_name=())

    sharded = jax.shard_map(attend, mesh=mesh, in_specs=P(None, "sp"), out_specs=P(None, "sp"))
    return sharded, (_tokens(mesh, length, heads),) * 2


def everything(
    devices: Sequence[Any], length: int, dtype: str = "bfloat16", broadcast: bool = False, dropout: float = 0.1
) -> Program:
    """A block of any length whose scores depend on all that they can depend on, with values of another size.

    With `broadcast` one row of the bias serves all queries, heads and batch rows, and key heads are shared.
    """
    put = _on(devices[0])
    batch, heads, dim, value_dim = 2, 4, 40, 24
    rule = Rule(softmax_scale=dim**-0.5, logits_soft_cap=30.0, dropout_prob=dropout)
    extra = {
        "first": put(batch, heads, length),
        "last": put(batch, heads, length),
        "q_segments": put(batch, length),
        "kv_segments": put(batch, length),
        "bias": put(*((1, 1, 1) if broadcast else (batch, heads, length)), length, dtype=dtype),
        "bits": put(1, 2, length, words_of(length), dtype=jnp.uint32),
        "bits_of_head": put(heads),
        "slopes": put(1, heads, dtype=jnp.float32),
        "seed": put(batch, dtype=jnp.uint32) if dropout else None,
        "reach": Reach(left=900, right=20),
    }
    sizes = {"kv_heads": 2 if broadcast else heads, "value_dim": value_dim, "dtype": dtype}
    return _both(_block(devices[0], (batch, length, heads, dim), rule, **sizes, **extra))


def _on(device: Any) -> Callable[..., jax.ShapeDtypeStruct]:
    sharding = NamedSharding(Mesh(np.array([device]), ("sp",)), P())

    def put(*shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)

    return put


def _block(
    device: Any,
    q_shape: tuple[int, int, int, int],
    rule: Rule,
    kv_heads: int | None = None,
    value_dim: int | None = None,
    dtype: str = "bfloat16",
    **fields: Any,
) -> Block:
    put = _on(device)
    batch, length, heads, dim = q_shape
    kv_heads, value_dim = kv_heads or heads, value_dim or dim
    pair = (2, batch, length, kv_heads, dim)
    optional = ("first", "last", "q_segments", "kv_segments", "bias", "bits", "bits_of_head", "slopes", "seed")
    return Block(
        q=put(*q_shape, dtype=dtype),
        kv=put(*(pair if value_dim == dim else (batch, length, kv_heads, dim + value_dim)), dtype=dtype),
        q_positions=put(1, length),
        kv_positions=put(1, length),
        q_index=put(1, length),
        kv_index=put(1, length),
        batch_index=put(batch),
        head_index=put(heads),
        rule=rule,
        **(dict.fromkeys(optional) | fields),
    )


def _both(block: Block) -> Program:
    put = _on(next(iter(block.q.sharding.device_set)))
    batch, length, heads, dim = block.q.shape
    out, lse = (
        put(batch, length, heads, block.value_dim, dtype=jnp.float32),
        put(batch, heads, length, dtype=jnp.float32),
    )
    dout, dq = put(*out.shape, dtype=block.q.dtype), put(batch, length, heads, dim, dtype=jnp.float32)

    def both(block: Block, partial: Partial, dout: Any, lse: Any, delta: Any, dq: Any) -> Any:
        return KERNEL.forward(block, partial), KERNEL.backward(block, dout, lse, delta, dq)

    mesh = block.q.sharding.mesh  # in which the kernels know their chip
    step = jax.shard_map(both, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    return step, (block, Partial(out, lse), dout, lse, lse, dq)
