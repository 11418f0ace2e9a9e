# SPDX-License-Identifier: Apache-2.0
"""The TPU attentions that benchmarks compare with: JAX's splash attention, tokamax's attention and its ring."""

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
"""A function of query, key and value `[N, T, H]`; the queries are already scaled."""


def has_tokamax() -> bool:
    return importlib.util.find_spec("tokamax") is not None


def _tokamax(module: str) -> Any:
    """Imports a private module of tokamax, because its ring has no public name."""
    return importlib.import_module(f"{_PLACE}.{module}")


def splash(
    length: int, heads: int, part: int = 512, fused: bool = True, tile: int = TILE, interpret: bool = False
) -> Attend:
    """JAX's splash kernels, causal, which compute `part` keys of a tile at a time. `fused`: one backward kernel."""
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
    """tokamax's ring over `sp`, without a mask: it takes other masks only as dense arrays of the whole sequence.

    `use_base2_exp` is off, because the results of the ring are wrong with it.
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
    """The same attention for `ringattn`'s arrays, `[1, T, N, H]` and not scaled."""

    def turned(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        query = query * (1 / math.sqrt(query.shape[-1]))
        q, k, v = (jnp.swapaxes(x[0], 0, 1) for x in (query.astype(key.dtype), key, value))
        return jnp.swapaxes(attend(q, k, v), 0, 1)[None]

    return turned


def program(devices: Sequence[Any], rival: str, length: int, heads: int, **options: Any) -> Any:
    """`(function, shapes)` of the output and gradients on one device, for the compiler."""
    attend = splash(length, heads, **options) if rival == "splash" else tokamax(length, **options)
    sharding = NamedSharding(Mesh(np.array(devices[:1]), ("sp",)), PartitionSpec())
    shape = jax.ShapeDtypeStruct((heads, length, 128), jnp.bfloat16, sharding=sharding)

    def both(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        out, pullback = jax.vjp(attend, q, k, v)
        return out, pullback(dout)

    return both, (shape,) * 4
