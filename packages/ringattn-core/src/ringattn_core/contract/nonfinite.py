# SPDX-License-Identifier: Apache-2.0
"""What becomes of NaN and infinity: whoever may see one gets NaN, nobody else does.

A product with a matrix mixes rows that see a key with rows that do not, and `0 * NaN` is NaN. So kernels get
operands that are finite where they are summed over, and the poison travels in scores (forward) and in the
log-sum-exp (backward), which are selected by visibility, element by element.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from . import rounding
from .packing import Packed, pack
from .protocol import Partial


def queries(q: Float[Array, "B T N H"]) -> tuple[Float[Array, "B T N H"], Bool[Array, "B T N"]]:
    """The queries with bad rows zeroed, and which rows are bad."""
    bad = ~jnp.isfinite(q).all(-1)
    return jnp.where(bad[..., None], 0, q), bad


def keys_and_values(k: Float[Array, "B S K H"], v: Float[Array, "B S K Hv"], poison: bool) -> Packed:
    """K and V packed and finite, but that a key with anything bad in it holds a NaN if `poison`.

    Dimension by dimension where both have as many: that is one pass over memory, and a reduction would be another.
    """
    bad = ~(jnp.isfinite(k) & jnp.isfinite(v)) if k.shape == v.shape else _any_bad(k) | _any_bad(v)
    k, v = jnp.where(bad, jnp.nan if poison else 0, k).astype(k.dtype), jnp.where(bad, 0, v)
    if k.shape != v.shape:
        return pack(k, v)
    # `pack`, as a selection: XLA on a GPU writes that at nearly twice the rate of a concatenation.
    return jnp.where(jax.lax.broadcasted_iota(jnp.int32, (2, 1, 1, 1, 1), 0) == 0, k[None], v[None])


def _any_bad(x: Float[Array, "*x H"]) -> Bool[Array, "*x 1"]:
    return ~jnp.isfinite(x).all(-1, keepdims=True)


def poisoned(partial: Partial, bad: Bool[Array, "B T N"]) -> Partial:
    """The result where bad queries that see any key are NaN."""
    # Apart from the swap: XLA on a GPU would read the queries in the order of the swapped axes.
    bad = jax.lax.optimization_barrier(bad)
    lost = jnp.swapaxes(bad, 1, 2) & ~jnp.isneginf(partial.lse)
    out = jnp.where(jnp.swapaxes(lost, 1, 2)[..., None], jnp.nan, partial.out)
    return Partial(out, jnp.where(lost, jnp.nan, partial.lse))


class Rows(NamedTuple):
    """The queries and what comes with them on the way back, as kernels take them.

    `whole` is `delta` as it is: of rows that see nothing too, and of bad rows.
    """

    q: Float[Array, "B T N H"]
    dout: Float[Array, "B T N Hv"]
    lse: Float32[Array, "B N T"]
    delta: Float32[Array, "B N T"]
    whole: Float32[Array, "B N T"]


def rows(
    q: Float[Array, "B T N H"],
    dout: Float[Array, "B T N Hv"],
    out: Float[Array, "B T N Hv"],
    rest: Float[Array, "B T N Hv"] | None,
    lse: Float32[Array, "B N T"],
    dlse: Float32[Array, "B N T"],
    seen: Bool[Array, "B N T"],
) -> Rows:
    """Rows that see nothing have no cotangent, and bad rows are NaN in `lse` only: all else of them is finite.

    Of `q` nothing is left where a row sees nothing. Else it is enough that what is no number is zero: every row with
    any of that gets NaN from its `lse`.
    """
    dout = jnp.where(jnp.swapaxes(seen, 1, 2)[..., None], dout, 0)
    # Not an einsum: XLA on a GPU makes as many products of vectors of that as there are rows.
    whole = jnp.swapaxes((dout.astype(jnp.float32) * rounding.whole(out, rest)).sum(-1), 1, 2) - dlse
    bad = seen & ~(jnp.isfinite(whole) & jnp.isfinite(lse))
    usable = seen & ~bad
    dout = jnp.where(jnp.swapaxes(usable, 1, 2)[..., None], dout, 0)
    numbers = jnp.where(jnp.isfinite(q) & jnp.swapaxes(seen, 1, 2)[..., None], q, 0)
    return Rows(numbers, dout, jnp.where(bad, jnp.nan, lse), jnp.where(usable, whole, 0.0), whole)
