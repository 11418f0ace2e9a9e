# SPDX-License-Identifier: Apache-2.0
"""Which other attentions for TPUs the benchmarks compare with: JAX's splash attention, and tokamax's with its ring."""

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TILE: Final = 1024
_PLACE: Final = "tokamax._src.ops.experimental.tpu.splash_attention"
Attend = Callable[..., Any]
"""Of query, key and value with heads before tokens, `[N, T, H]`; the scale is in the queries."""


def has_tokamax() -> bool:
    return importlib.util.find_spec("tokamax") is not None


def _tokamax(module: str) -> Any:
    """A module of tokamax; its ring has no public name."""
    return importlib.import_module(f"{_PLACE}.{module}")


def splash(
    length: int, heads: int, part: int = 512, fused: bool = True, tile: int = TILE, interpret: bool = False
) -> Attend:
    """JAX's kernels, causal, a `part` of a tile at a time; `fused` has one pass back."""
    two_passes: Any = {} if fused else {"block_q_dq": tile, "block_kv_dq": tile}
    sizes = splash_attention.BlockSizes(
        block_q=tile,
        block_kv=tile,
        block_kv_compute=part,
        block_q_dkv=tile,
        block_kv_dkv=tile,
        block_kv_dkv_compute=part,
        use_fused_bwd_kernel=fused,
        **two_passes,
    )
    mask = splash_attention.MultiHeadMask([splash_attention.CausalMask((length, length)) for _ in range(heads)])
    return splash_attention.make_splash_mha_single_device(mask, block_sizes=sizes, interpret=interpret)


def tokamax(length: int, part: int) -> Attend:
    """tokamax's kernels, causal."""
    mask = _tokamax("splash_attention_mask").CausalMask((length, length))
    sizes = _tokamax_sizes(part)
    return _tokamax("splash_attention_kernel").make_splash_mha(mask, config=sizes, q_seq_shards=1)


def _tokamax_sizes(part: int, tile: int = TILE, **options: Any) -> Any:
    return _tokamax("splash_attention_kernel").SplashConfig(
        block_q=tile,
        block_kv=tile,
        block_kv_compute=part,
        block_q_dkv=tile,
        block_kv_dkv=tile,
        block_kv_dkv_compute=part,
        **options,
    )


def tokamax_ring(mesh: Mesh, length: int, part: int = 512, tile: int = TILE, interpret: bool = False) -> Attend:
    """tokamax's ring over `sp`, with nothing masked: all other masks it wants as dense arrays of the whole sequence.

    Base 2 is left out: with it the ring's numbers are wrong.
    """
    kernel = _tokamax("ring_attention_kernel").make_ring_attention(
        _tokamax("splash_attention_mask").FullMask((length, length)),
        is_mqa=False,
        ring_axis="sp",
        config=_tokamax_sizes(part, tile, use_base2_exp=False, interpret=interpret),
        q_seq_shards=mesh.size,
        kv_seq_shards=mesh.size,
    )
    tokens = PartitionSpec(None, "sp")
    local = jax.shard_map(
        lambda kernel, q, k, v: kernel(q, k, v),
        mesh=mesh,
        in_specs=(kernel.manual_sharding_spec(), tokens, tokens, tokens),
        out_specs=tokens,
        check_vma=False,
    )
    return functools.partial(local, kernel)


def of_tokens(attend: Attend) -> Attend:
    """The same of arrays `[1, T, N, H]`, as `ringattn` has them."""

    def turned(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        query = query * (1 / math.sqrt(query.shape[-1]))
        q, k, v = (jnp.swapaxes(x[0], 0, 1) for x in (query.astype(key.dtype), key, value))
        return jnp.swapaxes(attend(q, k, v), 0, 1)[None]

    return turned


def program(devices: Sequence[Any], rival: str, length: int, heads: int, **options: Any) -> Any:
    """Output and gradients on one device, to be compiled: `(function, shapes)`."""
    attend = splash(length, heads, **options) if rival == "splash" else tokamax(length, **options)
    sharding = NamedSharding(Mesh(np.array(devices[:1]), ("sp",)), PartitionSpec())
    shape = jax.ShapeDtypeStruct((heads, length, 128), jnp.bfloat16, sharding=sharding)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        out, pullback = jax.vjp(attend, q, k, v)
        return out, pullback(dout)

    return both, (shape,) * 4
