# SPDX-License-Identifier: Apache-2.0
"""A block kernel: attention of one block of queries to one block of keys, and its gradients."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32
from ringattn_core import Block, Gradients, Partial, merging, visible

product = functools.partial(jnp.einsum, precision="highest", preferred_element_type=jnp.float32)


def grouped(x: Float32[Array, "B T N H"], block: Block) -> Float32[Array, "B T K G H"]:
    return x.astype(jnp.float32).reshape(*x.shape[:2], -1, block.group, x.shape[-1])


def weights(block: Block, lse: Float32[Array, "B N T"] | None = None):
    """`exp(s - lse)`, `[B, K, G, T, S]`, and `lse`: the given one, or that of this block alone."""
    s = product("btkgh,bskh->bkgts", grouped(block.q, block), block.k.astype(jnp.float32)) * block.rule.softmax_scale
    shape, seen = (s.shape[0], -1, *s.shape[3:]), visible(block)
    heads = s.reshape(shape) if seen is None else jnp.where(seen, s.reshape(shape), -jnp.inf)
    lse = jax.nn.logsumexp(heads, -1) if lse is None else lse
    return jnp.exp(heads - jnp.where(jnp.isneginf(lse), 0.0, lse)[..., None]).reshape(s.shape), lse


@merging
def forward(block: Block) -> Partial:
    p, lse = weights(block)
    out = product("bkgts,bskh->btkgh", p, block.v.astype(jnp.float32))
    return Partial(out.reshape(*block.q.shape[:3], -1), lse)


def backward(block: Block, dout, lse, delta, dq) -> Gradients:
    p, _ = weights(block, lse)
    dout = grouped(dout, block)
    dp = product("btkgh,bskh->bkgts", dout, block.v.astype(jnp.float32))
    ds = p * (dp - delta.reshape(*p.shape[:4], 1)) * block.rule.softmax_scale
    more = product("bkgts,bskh->btkgh", ds, block.k.astype(jnp.float32)).reshape(block.q.shape)
    dk, dv = product("bkgts,btkgh->bskh", ds, grouped(block.q, block)), product("bkgts,btkgh->bskh", p, dout)
    return Gradients(more if dq is None else dq + more, dk, dv)


class Kernel:
    forward = staticmethod(forward)
    backward = staticmethod(backward)


KERNEL = Kernel()
