# SPDX-License-Identifier: Apache-2.0
"""How the rows of the backward pass are made fit for kernels: `ringattn_core.finite.rows` in one pass over memory."""

from typing import Any, Final

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32
from ringattn_core import finite

from .kernels.rows import rows as kernel
from .launch import launch
from .operands import padded_dim

ELEMENTS: Final = 2048
"""About how many of each array a program reads."""


def rows(
    q: Float[Array, "B T N H"],
    dout: Float[Array, "B T N Hv"],
    out: Float[Array, "B T N Hv"],
    rest: Float[Array, "B T N Hv"] | None,
    lse: Float32[Array, "B N T"],
    dlse: Float32[Array, "B N T"],
    seen: Bool[Array, "B N T"],
) -> finite.Rows:
    """Rows that see nothing have no cotangent, and bad rows are NaN in `lse` only: all else of them is finite."""
    return finite.Rows(*_rows(q, dout, out, rest, lse, dlse, seen))


@jax.custom_batching.custom_vmap
def _rows(
    q: jax.Array,
    dout: jax.Array,
    out: jax.Array,
    rest: jax.Array | None,
    lse: jax.Array,
    dlse: jax.Array,
    seen: jax.Array,
) -> tuple[jax.Array, ...]:
    batch, length, heads, head_dim = q.shape
    dim, values = padded_dim(head_dim), padded_dim(out.shape[-1])
    at_once = max(ELEMENTS // max(dim, values), 1)
    count = batch * length * heads
    return launch(
        kernel,
        [q, dout, out, rest, lse, dlse, seen.astype(jnp.int8)],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, dout, lse, lse, lse)],
        grid=(-(-count // at_once),),
        warps=4,
        stages=1,
        name="ringattn_rows",
        COUNT=count,
        HEADS=heads,
        LENGTH=length,
        HEAD_DIM=head_dim,
        VALUE_DIM=out.shape[-1],
        DIM=dim,
        VALUES=values,
        ROWS=at_once,
        SPLIT=rest is not None,
    )


@_rows.def_vmap
def _(size: int, batched: Any, *arrays: Any) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
    found = jax.vmap(finite.rows, [0 if b else None for b in batched])(*arrays)
    return tuple(found), (True,) * len(found)
