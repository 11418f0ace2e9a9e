# SPDX-License-Identifier: Apache-2.0
"""How keys and values are packed for the kernels: `ringattn_core.finite.keys_and_values` in one pass over memory."""

import functools
from typing import Any, Final

import jax
from jaxtyping import Array, Float
from ringattn_core import finite
from ringattn_core.parcels import Packed

from .kernels.packing import packing
from .launch import launch

TILE: Final = 2048


def keys_and_values(k: Float[Array, "B S K H"], v: Float[Array, "B S K Hv"], poison: bool) -> Packed:
    """K and V packed and finite, but that a key with anything bad in it holds a NaN if `poison`."""
    if k.shape != v.shape:
        return finite.keys_and_values(k, v, poison)
    return _packed(poison)(k, v)


@functools.cache
def _packed(poison: bool) -> Any:
    @jax.custom_batching.custom_vmap
    def packed(k: jax.Array, v: jax.Array) -> jax.Array:
        (kv,) = launch(
            packing,
            [k, v],
            [jax.ShapeDtypeStruct((2, *k.shape), k.dtype)],
            grid=(-(-k.size // TILE),),
            warps=4,
            stages=1,
            name="ringattn_packing",
            COUNT=k.size,
            TILE=TILE,
            POISON=poison,
        )
        return kv

    @packed.def_vmap
    def _(size: int, batched: Any, k: jax.Array, v: jax.Array) -> tuple[jax.Array, bool]:
        whole = jax.vmap(functools.partial(finite.keys_and_values, poison=poison), [0 if b else None for b in batched])
        return whole(k, v), True

    return packed
