# SPDX-License-Identifier: Apache-2.0
"""Cleans the rows of the backward pass for kernels: `contract.nonfinite.rows` of core in one pass over memory.

Or in half of one: a look finds out whether kernels may read queries and cotangents as they came.
"""

from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32
from ringattn_core.contract import nonfinite
from ringattn_core.contract.protocol import OwnRows

from .kernels.rows import judging, mending_if_bad
from .kernels.rows import rows as kernel
from .launch import launch
from .operands import padded_dim

ELEMENTS: Final = 2048
"""About how many of each array a program reads."""
_AT_ONCE: Final = 1024
"""How many programs mend what hardly ever is to be mended: enough to be fast then, few enough to end at once else."""


class Given(NamedTuple):
    """The rows as kernels read them: `lse` is in units of log2, and finite where a row sees nothing.

    If those as they came may be unfit there are `mended` ones beside them: `kernels.rows.fit` says which to read.
    """

    q: Float[Array, "B T N H"]
    dout: Float[Array, "B T N Hv"]
    lse: Float32[Array, "B N T"]
    delta: Float32[Array, "B N T"]
    mended: tuple[Float[Array, "B T N H"], Float[Array, "B T N Hv"]] | None = None

    @property
    def operands(self) -> list[jax.Array | None]:
        """All but the queries, which are among `operands.INPUTS`, in the order of the kernels' parameters."""
        return [self.dout, self.lse, self.delta, *(self.mended or (None, None))]


def look(own: OwnRows, found: Int32[Array, " counts"]) -> tuple[Given, Int32[Array, " counts"]]:
    """Rows as they came, with `mended` ones that hold anything if all are fit; and what there is by now `found`."""
    constants, programs = _constants(own.q, own.dout)
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (own.lse, own.lse, found)]
    lse, delta, found = launch(
        judging,
        [own.q, own.dout, own.out, own.rest, own.lse, own.dlse, found],
        like,
        grid=(programs,),
        warps=4,
        stages=1,
        aliases={6: 2},
        name="ringattn_judging",
        SPLIT=own.rest is not None,
        SHIFTED=own.dlse is not None,
        **constants,
    )
    mended_q, mended_dout = launch(
        mending_if_bad,
        [own.q, own.dout, own.lse, lse, found],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (own.q, own.dout)],
        grid=(min(_AT_ONCE, programs),),
        warps=4,
        stages=1,
        name="ringattn_mending_if_bad",
        **constants,
    )
    return Given(own.q, own.dout, lse, delta, (mended_q, mended_dout)), found


def rows(
    q: Float[Array, "B T N H"],
    dout: Float[Array, "B T N Hv"],
    out: Float[Array, "B T N Hv"],
    rest: Float[Array, "B T N Hv"] | None,
    lse: Float32[Array, "B N T"],
    dlse: Float32[Array, "B N T"],
    seen: Bool[Array, "B N T"],
) -> nonfinite.Rows:
    """Rows that see nothing have no cotangent, and bad rows are NaN in `lse` only: all else of them is finite."""
    return nonfinite.Rows(*_rows(q, dout, out, rest, lse, dlse, seen))


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
    constants, programs = _constants(q, out)
    return launch(
        kernel,
        [q, dout, out, rest, lse, dlse, seen.astype(jnp.int8)],
        [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, dout, lse, lse, lse)],
        grid=(programs,),
        warps=4,
        stages=1,
        name="ringattn_rows",
        SPLIT=rest is not None,
        **constants,
    )


def _constants(q: jax.Array, out: jax.Array) -> tuple[dict[str, Any], int]:
    """What a kernel over all rows is compiled for, and how many programs have a share of them each."""
    batch, length, heads, head_dim = q.shape
    dim, values = padded_dim(head_dim), padded_dim(out.shape[-1])
    at_once = max(ELEMENTS // max(dim, values), 1)
    count = batch * length * heads
    constants = {"COUNT": count, "HEADS": heads, "LENGTH": length, "HEAD_DIM": head_dim, "VALUE_DIM": out.shape[-1]}
    return {**constants, "DIM": dim, "VALUES": values, "ROWS": at_once}, -(-count // at_once)


@_rows.def_vmap
def _(size: int, batched: Any, *arrays: Any) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
    found = jax.vmap(nonfinite.rows, [0 if b else None for b in batched])(*arrays)
    return tuple(found), (True,) * len(found)
