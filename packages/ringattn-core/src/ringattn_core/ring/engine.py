# SPDX-License-Identifier: Apache-2.0
"""Runs a call on one rank with a block kernel: the ring as one differentiable function, a `custom_vjp`."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int8, Int32

from ..contract.call import Call
from ..contract.protocol import BlockKernel, Partial
from ..contract.varying import align, axes_of
from ..errors import DerivativeError
from ..placement import axes
from ..placement.layout import Shards
from .backward import backward
from .blocks import Ring
from .forward import forward
from .key_ids import with_all_ids
from .plan import levels


def run(kernel: BlockKernel, call: Call, stripe: int = 1) -> Partial:
    """Runs the ring with `kernel`. Returns the result for this rank's queries and the keys of all ranks.

    `out` has the dtype of the queries. With the strategy "all_gather", each rank gathers the keys of all ranks and
    computes one block, without hops. In the striped layout, ranks take turns at runs of `stripe` consecutive tokens.
    """
    ring = ring_of(kernel, call, stripe=stripe)
    if call.expand is not None:  # key and value served for their shapes only
        call = dataclasses.replace(call, key=None, value=None)
    # Replicated inputs are marked as varying over the ring's mesh axes, so that JAX sums their gradients.
    return _attend(*align((ring, call), axes_of(ring, call)))


def ring_of(kernel: Any, call: Call, place: tuple[Any, ...] | None = None, stripe: int = 1) -> Ring:
    """The ring of this rank's call.

    `place` is `(rank, *sizes)`: this rank, and the size of each axis of the ring; by default they are read from the
    mesh axes of the call's placement. `kernel` may be `None` if nothing runs. `stripe` is as in `run`.
    """
    roles = call.placement.roles
    axis = () if place else roles.sequence
    rank, *sizes = place or (axes.coordinate(axis), *(axes.size((name,)) for name in axis))
    shards = Shards(call.placement.layout, math.prod(sizes), stripe, folded=call.placement.balance is not None)
    if call.placement.strategy == "all_gather":
        key_shards, loops = Shards("contiguous" if shards.folded else shards.layout, 1), ()
    else:
        lengths = call.query.shape[1], call.key.shape[1]
        key_shards, loops = shards, levels(call.reach_of_hops, shards, lengths, axis, tuple(sizes))
    return Ring(
        kernel,
        axis,
        query_shards=shards,
        key_shards=key_shards,
        levels=loops,
        rank=jnp.asarray(rank, jnp.int32),
        batch_index=_global_indices(roles.batch, call.query.shape[0]),
        head_index=_global_indices(roles.heads, call.query.shape[2]),
    )


def _global_indices(axis: tuple[str, ...], count: int) -> Int32[Array, " count"]:
    """The global indices of this rank's `count` entries of a batch or head axis that the mesh axes `axis` split."""
    return axes.coordinate(axis) * count + jnp.arange(count, dtype=jnp.int32)


@jax.custom_vjp
def attend(ring: Ring, call: Call) -> Partial:
    """The ring as one differentiable function; `max_logits` has no gradient."""
    return forward(ring, with_all_ids(ring, call.narrowed()))


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


class Residuals(NamedTuple):
    """What the backward pass needs of the forward pass."""

    bias_fixed: Int8[Array, " fixed"]
    """Whether the bias is not differentiated: of length 1 if so, else 0.

    A static value could not tell: JAX keeps one tree structure of residuals for each function that it has traced,
    whichever inputs are differentiated.
    """
    ring: Ring
    call: Call
    partial: Partial


def _forward_rule(*inputs: Any) -> tuple[Partial, Residuals]:
    """The result and the residuals. An input has a `value`, and `perturbed`: whether it is differentiated."""
    ring, call = jax.tree.map(lambda x: x.value, inputs)
    bias_fixed = call.bias is not None and not inputs[1].bias.perturbed
    call = with_all_ids(ring, first_derivative_only(call).narrowed())
    partial = forward(ring, call)
    kept = dataclasses.replace(partial, max_logits=None)
    return partial, Residuals(jnp.zeros(int(bias_fixed), jnp.int8), ring, call, kept)


def _backward_rule(residuals: Residuals, cotangents: Partial) -> tuple[None, Call]:
    """The backward rule. JAX gives a `SymbolicZero` for a result that the loss does not depend on."""
    ring, call = residuals.ring, residuals.call

    def array(x: Any) -> jax.Array:
        zero = isinstance(x, jax.custom_derivatives.SymbolicZero)
        return align(jnp.zeros(x.shape, x.dtype), axes_of(call)) if zero else x  # pyright: ignore[reportArgumentType]

    dout, dlse = first_derivative_only([array(x) for x in (cotangents.out, cotangents.lse)])
    return None, backward(ring, call, residuals.partial, dout, dlse, bias_fixed=residuals.bias_fixed.size == 1)


attend.defvjp(_forward_rule, _backward_rule, symbolic_zeros=True)
_attend = jax.jit(attend)
"""Equal calls compile once, even if the caller does not use `jax.jit`."""
