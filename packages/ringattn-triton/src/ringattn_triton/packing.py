# SPDX-License-Identifier: Apache-2.0
"""Packs keys and values for the kernels: `contract.nonfinite.keys_and_values` of core in one pass over memory."""

import functools
from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from ringattn_core.contract import nonfinite
from ringattn_core.contract.packing import Packed
from ringattn_core.contract.protocol import Own

from .kernels.packing import looking, packing, packing_if_bad
from .launch import launch

TILE: Final = 2048
_LOOKED_AT: Final = 8192
"""How many keys' and values' numbers a program looks at."""
_AT_ONCE: Final = 1024
"""How many programs pack what hardly ever is to be packed: enough to be fast then, few enough to end at once else."""


def keys_and_values(k: Float[Array, "B S K H"], v: Float[Array, "B S K Hv"], poison: bool) -> Packed:
    """K and V packed and finite, but that a key with anything bad in it holds a NaN if `poison`."""
    if k.shape != v.shape:
        return nonfinite.keys_and_values(k, v, poison)
    return _packed(poison)(k, v)


def look(own: Own) -> Own:
    """The same with the first of its counts as in how many places K and V hold what is no number.

    That takes half as long as to pack them.
    """
    (counts,) = launch(
        looking,
        [own.k, own.v, own.found],
        [jax.ShapeDtypeStruct(own.found.shape, jnp.int32)],
        grid=(-(-own.k.size // _LOOKED_AT),),
        warps=4,
        stages=1,
        aliases={2: 0},
        name="ringattn_looking",
        COUNT=own.k.size,
        TILE=_LOOKED_AT,
    )
    return own._replace(found=counts)


def if_bad(own: Own, poison: bool) -> Packed:
    """K and V packed and finite where anything in them is no number, else anything."""
    (kv,) = launch(
        packing_if_bad,
        [own.k, own.v, own.found],
        [jax.ShapeDtypeStruct((2, *own.k.shape), own.k.dtype)],
        grid=(min(_AT_ONCE, -(-own.k.size // TILE)),),
        warps=4,
        stages=1,
        name="ringattn_packing_if_bad",
        COUNT=own.k.size,
        TILE=TILE,
        POISON=poison,
    )
    return kv


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
        whole = jax.vmap(
            functools.partial(nonfinite.keys_and_values, poison=poison), [0 if b else None for b in batched]
        )
        return whole(k, v), True

    return packed
