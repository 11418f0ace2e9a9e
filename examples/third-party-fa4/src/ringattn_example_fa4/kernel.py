# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4, from the wheel `fa4-jax`, as a block kernel: its CuTe kernels on GPUs, its plain JAX on CPUs."""

import dataclasses
import functools
from importlib.util import find_spec
from typing import Any

import jax
import jax.numpy as jnp
from ringattn_core import from_flash


def on_gpus() -> bool:
    return jax.default_backend() == "gpu"


def why_not() -> str | None:
    """Why this backend cannot run here, or `None`."""
    needed = ("fa4_jax", "cutejax", "cutlass") if on_gpus() else ("fa4_jax",)
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        return f"{', '.join(missing)}: not installed: pip install 'fa4-jax[cu13]==0.1.0'"
    old = [x for x in jax.devices() if on_gpus() and float(x.compute_capability) < 8]
    return f"FlashAttention-4 needs compute capability 8.0, and {old[0].device_kind} has less" if old else None


@functools.cache
def ranges():
    """The class of fa4-jax's mask in which query `q` sees the keys from `first` to `last`."""
    from fa4_jax.masks import MaskMod, static  # pyright: ignore[reportMissingImports]

    @dataclasses.dataclass(frozen=True)
    class Ranges(MaskMod):
        first: Any
        last: Any
        by_head: bool = static()

        def __call__(self, b, h, q, kv):
            head = h if self.by_head else 0
            return (kv >= self.first[b, head, q]) & (kv <= self.last[b, head, q])

    return Ranges


def attention(q, scale, first, last, causal):
    """One of fa4-jax's two implementations, the attention that it computes, and the arrays of its mask."""
    from fa4_jax.attention import AttnConfig, get_backend  # pyright: ignore[reportMissingImports]

    name, arrays, mask = "cute" if on_gpus() else "reference", [], None
    if not causal:  # for a causal mask the kernels skip tiles
        shape = (q.shape[0], *first.shape[1:])
        first, last = (jnp.broadcast_to(x, shape) for x in (first, last))
        arrays, mask = jax.tree.flatten(ranges()(first, last, first.shape[1] > 1))
    config = AttnConfig(causal, local=False, window=(None, None), scale=scale, mask=mask, backend=name)
    return get_backend(name), config, tuple(arrays)


def forward(q, k, v, *, scale, first, last, causal=False):
    mask = {"first": first, "last": last, "causal": causal}
    if scale < 0:  # the CuTe kernels return NaN for negative scales
        return forward(-q, k, v, scale=-scale, **mask)
    implementation, config, arrays = attention(q, scale, **mask)
    return implementation.fwd_lse(config, q, k, v, arrays)


def backward(q, k, v, out, lse, dout, *, scale, first, last, causal):
    mask = {"first": first, "last": last, "causal": causal}
    if scale < 0:
        dq, dk, dv = backward(-q, k, v, out, lse, dout, scale=-scale, **mask)
        return -dq, dk, dv
    group = q.shape[2] // k.shape[2]
    if group > 1:  # each query head gets its own copy of k and v: README.md says why
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        dq, *of_copies = backward(q, k, v, out, lse, dout, scale=scale, **mask)
        dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3, dtype=jnp.float32) for x in of_copies)
        return dq, dk, dv
    implementation, config, arrays = attention(q, scale, **mask)
    if on_gpus():
        return implementation.vjp(config, q, k, v, out, lse, dout, None, arrays)
    # The plain JAX ignores `out` and `lse` of the whole ring, and computes those of these keys again. With `share`, the
    # part of a query's weight that these keys have, `share * dout` and a cotangent of their `lse` give the same result:
    # p = share * p_here, and ds = p * (dp - Σ dout * out) = p_here * (share * (dp - Σ dout * out_here) + dlse_here).
    q, k, v, out, dout = (x.astype(jnp.float32) for x in (q, k, v, out, dout))
    out_here, lse_here = implementation.fwd_lse(config, q, k, v, arrays)
    share = jnp.exp(lse_here - lse)
    dlse_here = share * jnp.einsum("btnh,btnh->bnt", dout, out_here - out)
    dout_here = dout * jnp.moveaxis(share, 1, 2)[..., None]
    return implementation.vjp(config, q, k, v, out_here, lse_here, dout_here, dlse_here, arrays)


KERNEL = from_flash(forward, backward)
