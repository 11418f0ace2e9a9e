# SPDX-License-Identifier: Apache-2.0
"""Runs a call on one rank with a block kernel: the ring as one differentiable function, a `custom_vjp`."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ..contract.call import Call
from ..contract.protocol import BlockKernel
from ..contract.varying import align, axes_of
from ..errors import DerivativeError
from ..placement import axes
from ..placement.layout import Shards
from .backward import backward
from .blocks import Location, Ring
from .forward import Residuals, Result, forward
from .plan import levels


def run(kernel: BlockKernel, call: Call, gathers: bool = False, stripe: int = 1) -> Result:
    """Runs the ring with `kernel`. Returns the result for this rank's queries and the keys of all ranks.

    With `gathers`, each rank gathers the keys of all ranks and computes one block, without hops. `stripe` is how many
    consecutive tokens form a run in a shard of the striped layout.
    """
    ring, location = prepared(kernel, call, None, gathers, stripe)
    if call.expand is not None:
        call = dataclasses.replace(call, key=None, value=None)
    # Replicated inputs are aligned, so that JAX sums their gradients.
    return _attend(ring, *align((call, location), axes_of(call, location)))


def prepared(
    kernel: Any, call: Call, place: tuple[Any, ...] | None = None, gathers: bool = False, stripe: int = 1
) -> tuple[Ring, Location]:
    """Prepares the engine's inputs: the static description of the ring, and the location of this rank.

    `place` is `(rank, *sizes)`: this rank, and the size of each axis of the ring; by default they are read from the
    mesh axes `call.axis_name`. `kernel` may be `None` if nothing runs. `gathers` and `stripe` are as in `run`.
    """
    axis = () if place else call.axis_name or ()
    rank, *sizes = place or (axes.coordinate(axis), *(axes.size((name,)) for name in axis))
    shards = Shards(call.layout, math.prod(sizes), stripe, folded=call.balance is not None)
    lengths = call.query.shape[1], call.key.shape[1]
    location = Location(
        jnp.asarray(rank, jnp.int32),
        _indices(call.batch_axis_name, call.query.shape[0]),
        _indices(call.head_axis_name, call.query.shape[2]),
    )
    ring = Ring(
        kernel,
        axis,
        query_shards=shards,
        key_shards=Shards("contiguous" if shards.folded else call.layout, 1) if gathers else shards,
        levels=() if gathers else levels(call.rule_of_hops, shards, lengths, axis, tuple(sizes)),
        expand=call.expand,
    )
    return ring, location


def _indices(axis: tuple[str, ...] | None, count: int) -> Int32[Array, " count"]:
    """The global indices of this rank's `count` entries of a batch or head axis that the mesh axes `axis` split."""
    return axes.coordinate(axis or ()) * count + jnp.arange(count, dtype=jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(ring: Ring, call: Call, location: Location) -> Result:
    """The result for this rank's queries and the keys of all ranks."""
    return forward(ring, call, location)[0]


def without_derivative(error: Callable[[], Exception]) -> Callable[[Any], Any]:
    """Makes an identity function; differentiating it raises the exception that `error()` returns."""

    @jax.custom_jvp
    def same(x: Any) -> Any:
        return x

    @same.defjvp
    def _(primals: Any, tangents: Any) -> Any:
        raise error()

    return same


first_derivative_only = without_derivative(
    lambda: DerivativeError(
        "the gradient of ring_attention was differentiated again, and there is no rule for that. Take first "
        "derivatives in reverse mode (grad, vjp). For a gradient in a loss, take it at jax.lax.stop_gradient(inputs)"
    )
)


def _forward_rule(ring: Ring, *given: Any) -> tuple[Result, tuple[jax.Array, Residuals]]:
    """The forward rule. JAX passes each input together with whether it is differentiated.

    The backward pass must know whether the bias is differentiated. The length of the first residual tells: 1 for a bias
    that is not differentiated, else 0. A static value could not tell, because JAX keeps one tree structure of residuals
    for each function that it has traced, whichever inputs are differentiated.
    """
    call, location = jax.tree.map(lambda x: x.value, given)
    bias_fixed = call.bias is not None and not given[0].bias.perturbed
    result, residuals = forward(ring, first_derivative_only(call), location)
    return result, (jnp.zeros(int(bias_fixed), jnp.int8), residuals)


def _backward_rule(ring: Ring, residuals: tuple[jax.Array, Residuals], cotangents: Result) -> tuple[Call, None]:
    """The backward rule. JAX gives a `SymbolicZero` for a result that the loss does not depend on.

    The third result, `max_logits`, has no gradient (`strategies.run`), so its cotangent is ignored.
    """
    bias_fixed, kept = residuals

    def array(x: Any) -> jax.Array:
        zero = isinstance(x, jax.custom_derivatives.SymbolicZero)
        return align(jnp.zeros(x.shape, x.dtype), axes_of(kept.call)) if zero else x  # pyright: ignore[reportArgumentType]

    dout, dlse = first_derivative_only([array(x) for x in cotangents[:2]])
    return backward(ring, bias_fixed.size == 1, kept, dout, dlse), None


attend.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
_attend = jax.jit(attend, static_argnums=0)
"""Equal calls compile once, even if the caller does not use `jax.jit`."""
