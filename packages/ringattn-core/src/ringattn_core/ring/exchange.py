# SPDX-License-Identifier: Apache-2.0
"""What a hop sends, and in which order. Both loops of the ring send by `exchange` alone.

XLA orders computations by their data only, so without the ties of this file it may run all sends first, or wait for a
send before it starts the kernel that is to hide it. The order of a hop:

1. the kernel of the hop before ends,
2. the keys of the next hop leave,
3. the gradients of the hop before leave,
4. the kernel of this hop runs, and hides both sends,
5. the keys arrive,
6. the gradients arrive.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..contract import ordering
from ..placement import axes
from .kv import KV, packed, total
from .plan import Hop, Level


class Exchange(NamedTuple):
    """What a hop has sent and received. Its kernel reads `kv`, the keys of this hop."""

    level: Level
    kv: KV
    keys_in: KV | None
    """The keys of the next hop; `None` at the last hop."""
    gradients_in: KV | None
    """The gradients that arrive; `None` in the forward pass, and at the first hop of the backward pass."""
    home: tuple[KV, ...]
    """The gradients of this rank's own keys that came straight from other ranks at earlier hops."""

    def before_kernel(self, dq: Any) -> Any:
        """The pytree `dq`, which the kernel of this hop continues; on CPU, not before both sends have arrived.

        A send blocks on CPU, so overlap would hide nothing, and would hold the gradients that leave and those that the
        kernel computes at once (`benchmarks/ring_memory.py`).
        """
        return ordering.tie_on_cpu(dq, (self.keys_in, self.gradients_in))

    def added_to(self, dkv: KV) -> tuple[KV, ...]:
        """The gradients after the kernel, which computed `dkv`. The first of them leaves at the next hop.

        Where ranks pass keys on, the gradients that arrive are of the same keys as `dkv`, and are added to it. Else
        they are of this rank's own keys, which are the last of the loop; they stay beside `dkv` until then.
        """
        gradients_in = ordering.tie(self.gradients_in, self.keys_in)
        arrived = self.home if gradients_in is None else (*self.home, gradients_in)
        return (dkv, *arrived) if self.level.direct else (functools.reduce(total, arrived, dkv),)


def exchange(level: Level, hop: Hop, given: KV, kv: KV, ended: Any, gradients: tuple[KV, ...] = ()) -> Exchange:
    """Sends the keys of the next hop, and the gradients that the hop before computed: the first of `gradients`.

    `given` are the keys that the loop began with, `kv` those of this hop. `ended` is a result of the kernel of the hop
    before, or `None` before the first kernel.
    """
    leaving, *home = gradients or (None,)
    kv = ordering.tie(kv, ended)
    if level.direct:
        keys_out = ordering.tie(given, ended)
    else:  # the kernel reads the array that is sent
        keys_out = kv = packed(kv) if hop.key_shift is not None else kv
    leaving = ordering.tie(leaving, kv)
    keys_in = _sent(level, keys_out, hop.key_shift, hop.next_rows)
    gradients_in = _sent(level, leaving, hop.gradient_shift)
    if keys_in is None:  # without a send of keys, only this tie makes the kernel wait for gradients to leave
        kv = ordering.tie(kv, leaving)
        kv = kv if level.direct else packed(kv)
    return Exchange(level, kv, keys_in, gradients_in, tuple(home))


def _sent(level: Level, kv: KV | None, shift: int | None, rows: tuple[int, int] | None = None) -> KV | None:
    """Sends `kv` to the rank `shift` ranks onward, and returns what arrives; `None` if `kv` or `shift` is `None`.

    With `rows`, `kv` must be a whole shard, and only these rows are sent.
    """
    if kv is None or shift is None:
        return None
    start, end = rows or (0, kv.length)
    if end - start < kv.length:
        cut = functools.partial(jax.lax.slice_in_dim, start_index=start, limit_index=end, axis=kv.token_axis)
        kv = KV(jax.tree.map(cut, kv.arrays), start)
    pairs = axes.pairs_of_shift(level.ranks, shift)
    arriving = jax.tree.map(functools.partial(_permuted, level.axis, pairs), packed(kv))
    return dataclasses.replace(arriving, received=True)


def _permuted(axis: tuple[str, ...], pairs: list[tuple[int, int]], x: jax.Array) -> jax.Array:
    send = functools.partial(axes.permuted, axis=axis, pairs=pairs)
    if x.dtype.itemsize != 2:
        return send(x)

    def as_integers(x: jax.Array) -> jax.Array:
        """Sends `x` as 16-bit integers. XLA on CPU sends bfloat16 as float32: see benchmarks/upstream/.

        On a GPU the bits are the same.
        """
        return jax.lax.bitcast_convert_type(send(jax.lax.bitcast_convert_type(x, jnp.uint16)), x.dtype)

    if not axes.bound(axis):  # a branch of `platform_dependent` cannot use an axis name that is not bound
        return as_integers(x)
    return jax.lax.platform_dependent(x, tpu=send, default=as_integers)
