# SPDX-License-Identifier: Apache-2.0
"""Runs a call on global arrays: pads uneven lengths, repeats key heads if there are fewer than ranks, and shards."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.core
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from ..backends.discovery import Registration
from ..contract.call import ARRAYS, Call
from ..errors import InputError, RingAttnError
from ..placement import arrays, axes
from ..placement.arrays import Roles
from ..placement.layout import pieces
from ..placement.mesh import over_explicit, placed, ranks_of
from ..tuning import choice
from .dispatch import answer, chosen
from .mesh_roles import refuse_repeated_indices, roles_of
from .selected import refuse_straddling
from .tracked import Arrays, within_tracked

Work = Callable[[Registration, Call], Any]
"""The computation that each rank runs on its shard: from a backend and a local call to the result."""


def specs(call: Call, roles: Roles) -> dict[str, P]:
    """The `PartitionSpec` of every array of the call, by name. Axes of size 1 that are broadcast are not split."""
    found = {name: roles.spec(ARRAYS[name], x.shape) for name, x in call.arrays.items()}
    return found if call.expand is None else found | {"latents": roles.spec(arrays.KeyIds), "expand_params": P()}


def sharded(call: Call, backend: Any, mesh: Any, in_specs: Any, out_specs: Any, work: Work = answer) -> Any:
    """Runs a call on global arrays: pads and shards them, runs `work` on every rank, cuts padding from the result."""
    length, given = call.query.shape[1], call
    call, roles = prepared(call, mesh, in_specs, out_specs)
    try:
        registration = chosen(backend, call, mesh)
    except RingAttnError as error:
        if given.q_segment_ids is None and call.q_segment_ids is not None and "SEGMENT_IDS" in str(error):
            lengths = " and ".join(str(x) for x in dict.fromkeys((length, given.key.shape[1])))
            error.add_note(f"Padding needs SEGMENT_IDS. Pass lengths that the ring divides, not {lengths}.")
        raise
    out, *others = call_over_shards(work, registration, call, mesh, specs(call, roles), roles)
    if call.query.shape[1] != length:
        whole = dataclasses.replace(roles, sequence=())
        kinds = zip((out, *others), call.results.values(), strict=True)
        out, *others = (_of_tokens(over_explicit(x, mesh, whole.spec(kind)), kind, length) for x, kind in kinds)
    return (out, *others) if others else out


def _of_tokens(x: jax.Array, kind: Any, length: int) -> jax.Array:
    """The part of `x` for the first `length` queries; all of `x` if this `kind` of result has no axis of queries."""
    names = arrays.letters(kind)
    return jax.lax.slice_in_dim(x, 0, length, axis=names.index("T")) if "T" in names else x


def prepared(call: Call, mesh: Any, in_specs: Any = None, out_specs: Any = None) -> tuple[Call, Roles]:
    """Pads the call to lengths that the ring divides, repeats key heads, and sets the axis names.

    Returns the call and the roles of the mesh axes.
    """
    roles = roles_of(call, mesh, in_specs, out_specs)
    refuse_repeated_indices(call)
    ranks, parts = ranks_of(mesh, roles.sequence), ranks_of(mesh, roles.heads)
    if call.expand is not None and parts > 1:
        fact = f"gives all heads, but the mesh axes {roles.heads} split them"
        remedy = "Call inside your own jax.shard_map that splits expand_params over them, or pass head_axis_name=()"
        raise InputError("expand", fact, remedy)
    more = _padding(call, ranks)
    refuse_straddling(call, ranks, (call.key.shape[1] + more[1]) // ranks)
    copies = math.lcm(call.key.shape[2], parts) // call.key.shape[2]
    if more != (0, 0) or copies > 1:
        # JAX does not pad an axis that explicit mesh axes split (benchmarks/upstream/resize_explicit_axis.py).
        whole = Roles(roles.batch, () if any(more) else roles.sequence, () if copies > 1 else roles.heads)
        call = _padded(dataclasses.replace(call, **_each(over_explicit, call, mesh, specs(call, whole))), *more)
        repeated = {"key": _repeated(call.key, copies), "value": _repeated(call.value, copies)}
        call = dataclasses.replace(call, **repeated, selected=call.selected_by(copies))
    return call.placed(**roles.names).with_shared_gradients(), roles


def _padding(call: Call, ranks: int) -> tuple[int, int]:
    """How many queries and keys to add, so that all ranks have equally many, and whole blocks of `selected`.

    If there are as many queries as keys, there are after padding too.
    """
    chunks = ranks * pieces(call.placement.balance or call.placement.layout)
    blocks = chunks * call.selected_size if ranks > 1 and call.placement.layout == "contiguous" else chunks
    queries, keys = call.query.shape[1], call.key.shape[1]
    return -queries % (blocks if queries == keys else chunks), -keys % blocks


def call_over_shards(
    work: Work, registration: Registration, call: Call, mesh: Any, split: dict[str, P], roles: Roles
) -> tuple[jax.Array, ...]:
    """Runs `work` on each shard of global arrays. Returns the results that the call asks for (`call.results`).

    `split` has the specs of the input arrays by name; `roles` gives the specs of the results.
    """
    shards, options = _each(placed, call, mesh, split), dataclasses.replace(call, **dict.fromkeys(split))
    out_specs = tuple(roles.spec(kind) for kind in call.results.values())
    program = Program(
        work, registration, options, mesh, tuple(split.items()), out_specs, choice.state(registration.name)
    )
    return _run(program, shards)


@dataclasses.dataclass(frozen=True)
class Program:
    """The static part of a call on global arrays. Calls with equal static parts compile once.

    `options` is the call without its arrays. Kernel parameters are chosen while the call is traced; `state` changes
    with the tuning policy, overlays and tuned results, so that JAX then traces the call again.
    """

    work: Work
    registration: Registration
    options: Call
    mesh: Any
    in_specs: tuple[tuple[str, P], ...]
    out_specs: tuple[P, ...]
    state: Any

    def of_rank(self, local: Arrays) -> tuple[jax.Array, ...]:
        """A rank's results, from its arrays `local`."""
        found = self.work(self.registration, dataclasses.replace(self.options, **local))
        return found if len(self.out_specs) > 1 else (found,)


@functools.partial(jax.jit, static_argnums=0)
def _run(program: Program, shards: Arrays) -> tuple[jax.Array, ...]:
    """The `shard_map` under `jax.jit`: equal calls compile once, even if the caller does not use `jax.jit`."""
    mesh, in_specs, out_specs = program.mesh, dict(program.in_specs), program.out_specs
    if axes.tracked():
        return within_tracked(program.of_rank, mesh, in_specs, out_specs)(shards)
    # check_vma=False: Triton and Pallas kernels do not declare over which axes results vary.
    free = set(mesh.axis_names) - axes.manual()
    return jax.shard_map(
        program.of_rank, mesh=mesh, in_specs=(in_specs,), out_specs=out_specs, axis_names=free, check_vma=False
    )(shards)


def _repeated(x: Float[Array, "B S K H"], copies: int) -> Float[Array, "B S copies*K H"]:
    """Repeats every key head `copies` times, so that ranks share no head. Sums gradients of copies in float32."""
    return x if copies == 1 else jnp.repeat(x.astype(jnp.float32), copies, 2).astype(x.dtype)


def _each(place: Callable[..., jax.Array], call: Call, mesh: Any, split: dict[str, P]) -> Arrays:
    """`place(x, mesh, spec)` of each array `x` of the call, by name; `split` has the specs, as `specs` returns them."""
    return {
        name: jax.tree.map(functools.partial(place, mesh=mesh, spec=spec), getattr(call, name))
        for name, spec in split.items()
    }


_ABSENT: Final = ("_ids", "check_positions", "selected")
"""The ends of the names of arrays that are padded with -1."""


def _padded(call: Call, queries: int, keys: int) -> Call:
    """Adds `queries` and `keys` padding tokens. `sharded` removes padding queries from the result.

    If there are padding keys, padding tokens get negative segment ids, so that no query sees them. With
    `return_max_logits`, padding queries get them in any case, so that their scores do not count.
    """
    if (keys or (queries and call.rule.return_max_logits)) and call.q_segment_ids is None:
        ids = {
            f"{side}_segment_ids": jnp.zeros(x.shape[:2], jnp.int32)
            for side, x in (("q", call.query), ("kv", call.key))
        }
        call = dataclasses.replace(call, **ids)
    extra = {"T": queries, "S": keys, "S_global": keys, "t": queries}
    grown: dict[str, Any] = {}
    for name, x in call.arrays.items():
        named = zip(arrays.letters(ARRAYS[name], x.ndim), x.shape, strict=True)
        whole = call.query.shape[1] != 1
        widths = [(0, 0 if a == "t" and n == 1 and whole else extra.get(a, 0)) for a, n in named]
        if any(width for _, width in widths):
            grown[name] = jnp.pad(x, widths, constant_values=-1 if name.endswith(_ABSENT) else 0)
    if call.latents is not None:
        grown["latents"] = [jnp.pad(x, [(0, 0), (0, keys), *[(0, 0)] * (x.ndim - 2)]) for x in call.latents]
    return dataclasses.replace(call, **grown)
