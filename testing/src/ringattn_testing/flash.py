# SPDX-License-Identifier: Apache-2.0
"""A fused attention and its backward pass in plain JAX, of the form that `from_flash` makes rings of."""

from typing import Any

import jax
import jax.numpy as jnp


def probabilities(q: Any, k: Any, lse: Any, scale: float, seen: Any) -> Any:
    """The probabilities of each query head, and the log-sum-exp. A kernel may take an infinite `lse` to mean no key."""
    group = q.shape[2] // k.shape[2]
    scores = jnp.einsum("btnh,bsnh->bnts", q, jnp.repeat(k, group, 2), preferred_element_type=jnp.float32) * scale
    if seen is not None:
        scores = jnp.where(seen, scores, -jnp.inf)
    lse = jax.nn.logsumexp(scores, -1) if lse is None else lse
    return jnp.exp(scores - jnp.where(jnp.isinf(lse), 0.0, lse)[..., None]), lse


def attended(q: Any, k: Any, v: Any, scale: float, seen: Any) -> Any:
    p, lse = probabilities(q, k, None, scale, seen)
    return jnp.einsum("bnts,bsnh->btnh", p.astype(q.dtype), jnp.repeat(v, q.shape[2] // k.shape[2], 2)), lse


def gradients(q: Any, k: Any, v: Any, lse: Any, dout: Any, delta: Any, scale: float, seen: Any) -> Any:
    group = q.shape[2] // k.shape[2]
    keys, values = (jnp.repeat(x, group, 2).astype(jnp.float32) for x in (k, v))
    p, _ = probabilities(q, k, lse, scale, seen)
    queries, given = q.astype(jnp.float32), dout.astype(jnp.float32)
    ds = p * (jnp.einsum("btnh,bsnh->bnts", given, values) - delta[..., None]) * scale
    dk, dv = jnp.einsum("bnts,btnh->bsnh", ds, queries), jnp.einsum("bnts,btnh->bsnh", p, given)
    dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[3]).sum(3) for x in (dk, dv))
    return jnp.einsum("bnts,bsnh->btnh", ds, keys).astype(q.dtype), dk.astype(q.dtype), dv.astype(q.dtype)


def delta_of(out: Any, dout: Any) -> Any:
    return jnp.einsum("btnh,btnh->bnt", dout.astype(jnp.float32), out.astype(jnp.float32))
