# SPDX-License-Identifier: Apache-2.0
"""FlashAttention-4, from the wheel `fa4-jax`, as a block kernel: its CuTe kernels on GPUs, its plain JAX on CPUs."""

from importlib.util import find_spec

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


def attention(scale, causal):
    """One of fa4-jax's two implementations, and the attention that it computes."""
    from fa4_jax.attention import AttnConfig, get_backend  # pyright: ignore[reportMissingImports]

    name = "cute" if on_gpus() else "reference"
    return get_backend(name), AttnConfig(causal, local=False, window=(None, None), scale=scale, mask=None, backend=name)


def forward(q, k, v, *, scale, causal):
    if scale < 0:  # the CuTe kernels return NaN for negative scales
        return forward(-q, k, v, scale=-scale, causal=causal)
    implementation, config = attention(scale, causal)
    return implementation.fwd_lse(config, q, k, v, ())


def backward(q, k, v, out, lse, dout, *, scale, causal):
    if scale < 0:
        dq, dk, dv = backward(-q, k, v, out, lse, dout, scale=-scale, causal=causal)
        return -dq, dk, dv
    group = q.shape[2] // k.shape[2]
    if group > 1:  # each query head gets its own copy of k and v: README.md says why
        k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
        dq, *of_copies = backward(q, k, v, out, lse, dout, scale=scale, causal=causal)
        dk, dv = (x.reshape(*x.shape[:2], -1, group, x.shape[-1]).sum(3, dtype=jnp.float32) for x in of_copies)
        return dq, dk, dv
    implementation, config = attention(scale, causal)
    if on_gpus():
        return implementation.vjp(config, q, k, v, out, lse, dout, None, ())
    # The plain JAX ignores `out` and `lse` of the whole ring, and computes those of these keys again. With `share`, the
    # part of a query's weight that these keys have, `share * dout` and a cotangent of their `lse` give the same result:
    # p = share * p_here, and ds = p * (dp - Σ dout * out) = p_here * (share * (dp - Σ dout * out_here) + dlse_here).
    q, k, v, out, dout = (x.astype(jnp.float32) for x in (q, k, v, out, dout))
    out_here, lse_here = implementation.fwd_lse(config, q, k, v, ())
    share = jnp.exp(lse_here - lse)
    dlse_here = share * jnp.einsum("btnh,btnh->bnt", dout, out_here - out)
    dout_here = dout * jnp.moveaxis(share, 1, 2)[..., None]
    return implementation.vjp(config, q, k, v, out_here, lse_here, dout_here, dlse_here, ())


KERNEL = from_flash(forward, backward)
