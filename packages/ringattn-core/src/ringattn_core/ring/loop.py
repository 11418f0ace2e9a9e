# SPDX-License-Identifier: Apache-2.0
"""The ring with a body of the caller's own, in place of attention: a loop over the shards of all ranks."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ..contract import ordering
from ..contract.varying import align, axes_of
from ..errors import DerivativeError, InputError, MeshError
from ..masks import Reach
from ..placement import axes
from ..placement.arrays import as_array
from ..placement.axes import AxisName
from ..placement.layout import Shards
from ..placement.mesh import explicit_spec
from ..placement.split import Split, split_of
from ..placement.tokens import TokenRing
from . import backward, forward
from .engine import without_derivative
from .kv import KV
from .plan import levels

_not_differentiated = without_derivative(
    lambda: DerivativeError(
        "ring_loop was differentiated, and has no derivative. Put it in a jax.custom_vjp, whose backward pass may be a "
        "ring_loop with send_home=True, or take jax.lax.stop_gradient of its arrays"
    )
)


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of one rank, as `ring_loop` gives them to its body."""

    arrays: Any
    """The shard of each array, `[B, tokens, ...]`, by name."""
    index: Int32[Array, " tokens"]
    """The index of each token in the whole sequence; it increases in every layout."""
    total: int
    """The number of tokens of the whole sequence."""


def ring_loop(
    body: Callable[[Tokens, Tokens, Any], Any],
    own: Mapping[str, Any],
    travelling: Mapping[str, Any],
    *,
    send_home: bool = False,
    axis_name: AxisName = None,
    mesh: Any = None,
    layout: str = "contiguous",
) -> Any:
    """Runs `carry = body(own, theirs, carry)` on every rank, for the shards `theirs` of all ranks; returns the carry.

    `own` stays on its rank, and `travelling` goes round the ring: the next shard arrives while the body computes. A
    body sees the shards in no promised order, so its result must not depend on the order. The body is
    traced once for each hop, on long rings once for many hops. It may hold no collective over the ring.

    With `mesh`, or under `jax.set_mesh`, arrays are global; in your own `jax.shard_map`, they are this rank's shard.
    The loop has no derivative, because JAX would keep the arrays of all hops. Put it in a `jax.custom_vjp`, whose
    backward pass may be a second loop with `send_home`.

    Args:
        body: Gets two `Tokens`, of this rank and of some rank, and the carry, which is `None` at the first call. It
            returns the next carry: a pytree of arrays `[B, T, ...]`. The function is hashable; with equal functions,
            calls compile once.
        own: Arrays `[B, T, ...]` by name, or pytrees of arrays, in the order of `layout`. Errors name them.
        travelling: Arrays `[B, S, ...]` by name, in the order of `layout`, of integers or real floats.
        send_home: The body returns `(carry, home)`: `home` is a pytree of arrays `[B, S, ...]`, such as the gradients
            of `theirs`. They are summed over all ranks, and arrive on the rank that owns the shard; the loop then
            returns the pair of the last carry and these sums.
        axis_name: The mesh axes of the ring; `None` if the sequence is not split.
        mesh: The mesh over which the ring splits the global arrays.
        layout: As in `ring_attention`.
    """
    own, travelling = (
        {name: jax.tree.map(functools.partial(as_array, name), x) for name, x in side.items()}
        for side in (own, travelling)
    )
    both = own | {f"travelling {name}" if name in own else name: x for name, x in travelling.items()}
    split = split_of(mesh, {"axis_name": axis_name}, both)
    _refuse_half_manual(split, [*own.values(), *travelling.values()])
    for name_of_side, side in (("own", own), ("travelling", travelling)):
        named = [(name, x) for name, tree in side.items() for x in jax.tree.leaves(tree)]
        if not named:
            raise InputError(name_of_side, "has no array", "Pass at least one array [B, tokens, ...] by name")
        for name, x in named:
            TokenRing.of(name, x, split, layout)
            if x.shape[:2] != named[0][1].shape[:2]:
                fact = f"has shape {x.shape}, and {named[0][0]} has {named[0][1].shape}"
                raise InputError(name, fact, "The arrays of one side have equal numbers of rows and of tokens")
            if side is travelling and not (x.dtype != jnp.bool_ and jnp.isrealobj(x)):
                fact = f"has dtype {x.dtype}, which the ring does not send"
                raise InputError(name, fact, "Send integers or real floats, such as int8 in place of bool")
    leaves, tree = jax.tree.flatten(_not_differentiated((own, travelling)))
    ring = TokenRing.of("own", leaves[0], split, layout)
    return ring.run(_on_rank, (body, send_home, tree), (True,) * len(leaves), *leaves, alike=False)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _on_rank(ring: TokenRing, body: Callable[..., Any], send_home: bool, tree: Any, *leaves: jax.Array) -> Any:
    """The work of `ring_loop` on one rank's shards."""
    rank = jnp.asarray(axes.coordinate(ring.names), jnp.int32)
    (own, travelling), rank = align((jax.tree.unflatten(tree, leaves), rank), axes_of(rank, *leaves))
    shards, (keys, keys_tree) = Shards(ring.layout, ring.ranks), jax.tree.flatten(travelling)
    homeward: list[Any] = []  # the structure of `home`, known once the body is traced

    def tokens(arrays: Any, owner: Any) -> Tokens:
        length = jax.tree.leaves(arrays)[0].shape[1]
        return Tokens(arrays, align(shards.indices(owner, length), axes_of(rank)), length * ring.ranks)

    mine = tokens(own, rank)

    def one_hop(kv: KV, owner: Any, carry: Any) -> Any:
        # As in the forward pass of attention: on CPU, what derives from the owner is computed hop by hop.
        theirs = tokens(jax.tree.unflatten(keys_tree, kv.arrays), ordering.tie_on_cpu(owner, _first(carry)))
        return body(mine, theirs, carry)

    def one_hop_home(kv: KV, owner: Any, sums: backward.Sums) -> tuple[KV, backward.Sums]:
        carry, home = one_hop(kv, owner, sums.dq)
        arrays, structure = jax.tree.flatten(home)
        homeward[:] = [structure]
        return KV(arrays), sums._replace(dq=carry)

    sizes = tuple(axes.size((name,)) for name in ring.names)
    loops = levels(Reach(), shards, (mine.index.size, keys[0].shape[1]), ring.names, sizes)
    if not send_home:
        body_of_loop: Any = one_hop
        for level in loops:
            body_of_loop = forward.around(level, body_of_loop, _first)
        return body_of_loop(KV(keys), rank, None)
    body_of_loop = one_hop_home
    for level in loops:
        body_of_loop = backward.around(level, body_of_loop)
    home, sums = body_of_loop(KV(keys), rank, backward.Sums())  # `dq` is the carry: what each hop continues
    return sums.dq, jax.tree.unflatten(homeward[0], home.arrays)


def _refuse_half_manual(split: Split, arrays: Any) -> None:
    """Raises in a `shard_map` over the ring alone whose local arrays explicit mesh axes split further."""
    further = {name for x in jax.tree.leaves(arrays) for entry in explicit_spec(x) for name in axes.names(entry)}
    if split.mesh is None and further:
        raise MeshError(
            f"the surrounding shard_map is over axis_name={split.ring} only, and the mesh axes "
            f"{', '.join(map(repr, sorted(further)))} split its arrays further. Make these axes of the shard_map too"
        )


def _first(carry: Any) -> Any:
    """An array of the carry; `None` before the first hop."""
    return next(iter(jax.tree.leaves(carry)), None)
