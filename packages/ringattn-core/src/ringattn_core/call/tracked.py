# SPDX-License-Identifier: Apache-2.0
"""Runs a call on global arrays in a `shard_map` inside another one that has `check_vma=True`, as in a pipeline."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jaxtyping import Float

from ..contract.call import ARRAYS
from ..contract.varying import align, axes_of
from ..placement import axes
from ..ring.remat import LSE_NAME

Arrays = dict[str, Any]
"""The arrays of a call by name; those of `expand` are lists of arrays."""


def within_tracked(
    of_rank: Callable[[Arrays], Any], mesh: Any, in_specs: dict[str, P], out_specs: tuple[P, ...]
) -> Callable[[Arrays], Any]:
    """Wraps `of_rank` in a `shard_map` over the axes of `mesh` that no surrounding `shard_map` has made manual.

    JAX cannot differentiate a `shard_map` inside another (benchmarks/upstream/nested_shard_map.py): it splits the
    residuals over the outer axes a second time. So the forward pass and the backward pass are two `shard_map`s, and a
    `custom_vjp` hands the residuals from one to the other. The residuals vary over all axes that split the output, so
    the inputs are made to vary over these axes from the start.

    If `jax.checkpoint`, or hoisting constants out of a `lax.scan`, split the forward pass in two, JAX would fail for
    the same reason. So the forward pass is one operation, which JAX cannot split (`_undivided`).
    """
    over = tuple(name for entry in out_specs[0] for name in axes.names(entry))
    shard = functools.partial(jax.shard_map, mesh=mesh, axis_names=set(mesh.axis_names) - axes.manual())
    floating = {name: spec for name, spec in in_specs.items() if name not in ARRAYS or ARRAYS[name].dtype is Float}

    def forward(placed: Arrays) -> Any:
        structure = []

        def of_shard(local: Arrays) -> Any:
            varied = {name: local[name] for name in floating}
            out, pull = jax.vjp(lambda varied: of_rank(local | align(varied, frozenset(over))), varied)
            residuals, tree = jax.tree.flatten(align(pull, frozenset(over)))
            structure.append(tree)
            return out, [x[None] for x in residuals]

        computed = _undivided(shard(of_shard, in_specs=(in_specs,), out_specs=(out_specs, P(over))))
        # A policy keeps all residuals or none: computing one residual again would compute all.
        out, residuals = checkpoint_name(computed(placed), LSE_NAME)
        return out, jax.tree.unflatten(structure[0], residuals)

    def backward(pull: Any, dout: Any) -> Any:
        def of_shard(pull: Any, dout: Any) -> Any:
            (found,) = jax.tree.map(lambda x: x[0], pull)(dout)
            return found

        found = shard(of_shard, in_specs=(P(over), out_specs), out_specs=floating)(pull, dout)
        return ({name: found.get(name) for name in in_specs},)

    run = jax.custom_vjp(shard(of_rank, in_specs=(in_specs,), out_specs=out_specs))
    run.defvjp(forward, backward)
    return lambda placed: run(align(placed, axes_of(placed)))


def _undivided(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes `function` one operation: JAX neither splits it for a checkpoint nor hoists a part of it out of a loop."""
    whole = jax.custom_batching.custom_vmap(function)

    @whole.def_vmap
    def rule(_: int, batched: Any, *given: Any) -> tuple[Any, Any]:
        in_axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(batched))
        result = _undivided(jax.vmap(function, in_axes))(*given)
        return result, jax.tree.map(lambda _: True, result)

    return whole
