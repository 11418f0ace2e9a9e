# SPDX-License-Identifier: Apache-2.0
"""A call of `ring_attention` described by shapes and options, without its large arrays, and the call of each rank."""

import argparse
import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh
from ringattn_core import masks
from ringattn_core.backends.discovery import imported
from ringattn_core.call import sharding
from ringattn_core.call.attention import ring_attention
from ringattn_core.call.validation import validated
from ringattn_core.contract.call import ARRAYS, Call
from ringattn_core.errors import InputError, in_one_line
from ringattn_core.masks.info import MaskInfo
from ringattn_core.placement.layout import canonical, refuse_indivisible
from ringattn_core.placement.reorder import to_layout

from .call_arguments import option_arguments, shape_of

AXIS: Final = "ring"
GROUPS: Final = "groups"
"""The name of the outer mesh axis of a ring over two axes."""
MOST_RANKS: Final = 4096
"""The largest ring: an analysis takes time and memory proportional to the square of the number of ranks."""
_MOST_ELEMENTS: Final = 2**48
"""The most elements of an array: XLA overflows on the bytes of larger arrays."""
_MOST_TOKENS: Final = 2**26
"""The most tokens whose ids or positions are computed one by one; with more, `explain` would take minutes."""


@dataclasses.dataclass(frozen=True)
class AbstractCall:
    """A call with `mesh=`. Lengths are those of the whole sequence, batch and heads those of one device.

    `ring` is the number of ranks. `inner` of them lie along the last mesh axis: all, unless the ring has two axes.

    `floating` are the shapes of the differentiable inputs. `integers` are segment ids and positions in layout order,
    the same in every batch row; they have values, because they decide what is visible. `options` are the other keyword
    arguments. `said` are the arguments on the command line, by name, that differ from their defaults.
    """

    ring: int
    inner: int
    floating: dict[str, jax.ShapeDtypeStruct]
    integers: dict[str, np.ndarray]
    options: dict[str, Any]
    said: dict[str, Any]

    @classmethod
    def of(cls, arguments: argparse.Namespace) -> Self:
        """The call that the parsed command line `arguments` describes; `call_arguments.add` defines these arguments."""
        if not 1 <= arguments.ring <= MOST_RANKS:
            raise InputError("--ring", f"got {arguments.ring}", f"Pass the number of ranks, from 1 to {MOST_RANKS}")
        inner = getattr(arguments, "inner", None)
        inner = arguments.ring if inner is None else inner
        if inner < 1 or arguments.ring % inner:
            raise InputError("--inner", f"got {inner}", f"Pass a divisor of the ring of {arguments.ring}")
        batch, tokens, heads, dim = arguments.query
        keys, key_heads, *value_dim = arguments.kv or (tokens, heads)
        sizes = {"B": batch, "T": tokens, "N": heads, "H": dim, "S": keys, "K": key_heads}
        shapes: dict[str, tuple[int, ...]] = {
            "query": arguments.query,
            "key": (batch, keys, key_heads, dim),
            "value": (batch, keys, key_heads, *(value_dim or (dim,))),
        }
        _refuse_many_tokens(arguments, batch * tokens, batch * keys)
        options: dict[str, Any] = {"layout": arguments.layout, "axis_name": AXIS}
        said = {name: getattr(arguments, name) for name in ("documents", "prefix", "mask_builder")}
        said |= {"restart_positions": arguments.restart_positions or None}
        parameters = inspect.signature(ring_attention).parameters
        for name, _ in option_arguments():
            value = getattr(arguments, name)
            if value in (None, parameters[name].default):
                continue
            said[name] = True if value == () else value
            if isinstance(value, tuple) and name in ARRAYS:
                shapes[name] = shape_of(name, value, sizes)
            else:
                options[name] = value
        for name, shape in shapes.items():
            if math.prod(shape) > _MOST_ELEMENTS:
                fact = f"{'x'.join(map(str, shape))} has more than 2^48 elements"
                raise InputError(name, fact, "Pass smaller sizes")
        dtypes: dict[str, str] = dict.fromkeys(("query", "key", "value", "bias"), arguments.dtype)
        return cls(
            ring=arguments.ring,
            inner=inner,
            floating={x: jax.ShapeDtypeStruct(shape, dtypes.get(x, "float32")) for x, shape in shapes.items()},
            integers=_packed(arguments, batch, tokens),
            options=options | _made(arguments),
            said={name: value for name, value in said.items() if value is not None},
        )

    @property
    def mesh(self) -> AbstractMesh:
        """An abstract mesh, which has no devices, with the ring as its only axis.

        The axis is not explicit: `jit` cannot compute arrays with explicit shardings on a mesh without devices.
        """
        return AbstractMesh((self.ring,), (AXIS,), axis_types=(AxisType.Auto,))

    def mesh_of(self, devices: Sequence[jax.Device]) -> Mesh:
        """A mesh of the first `ring` of these devices, with the outer and the inner axis of the ring."""
        return Mesh(np.array(devices[: self.ring]).reshape(-1, self.inner), (GROUPS, AXIS))

    def attend(self, floating: dict[str, jax.Array], mesh: Any, backend: str) -> Any:
        """Calls `ring_attention` on `mesh`, a result of `mesh_of`, with arrays of the shapes in `floating`."""
        options = self.options | {"axis_name": mesh.axis_names}
        return ring_attention(**floating, **self.integers, **options, mesh=mesh, backend=backend)


def trace(call: AbstractCall, work: Callable[[Call], Any]) -> Any:
    """The shapes of what `work` returns for the call of each rank, stacked along a first axis over the ranks.

    Traces `work` once, and computes nothing.
    """
    return jax.eval_shape(functools.partial(every_rank, call, work), call.integers)


def local_call(call: AbstractCall) -> Call:
    """The call of one rank as the ring engine gets it, in shapes only, padding included."""
    stacked = trace(call, lambda local: local)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), stacked)


def every_rank(call: AbstractCall, work: Callable[[Call], Any], integers: dict[str, Any]) -> Any:
    """Calls `work` with the call of each rank; stacks the results. A `vmap` with the axis name replaces `shard_map`."""
    zeros = {name: jnp.zeros(x.shape, x.dtype) for name, x in call.floating.items()}
    whole, roles = sharding.prepared(validated(**zeros, **integers, **call.options, ranks=1), call.mesh)
    arrays, split = {}, {}
    for name, spec in sharding.specs(whole, roles).items():
        x, axis = getattr(whole, name), spec.index(AXIS) if AXIS in spec else None
        split[name] = axis
        arrays[name] = x if axis is None else x.reshape(*x.shape[:axis], call.ring, -1, *x.shape[axis + 1 :])
    rest = dataclasses.replace(whole, **dict.fromkeys(ARRAYS))

    def of_rank(local: dict[str, jax.Array]) -> Any:
        return work(dataclasses.replace(rest, **local))

    return jax.vmap(of_rank, (split,), axis_name=AXIS, axis_size=call.ring)(arrays)


def _refuse_many_tokens(arguments: argparse.Namespace, queries: int, keys: int) -> None:
    """Raises for more than `_MOST_TOKENS` tokens if the call needs an array of their ids or positions."""
    uneven = queries % arguments.ring or keys % arguments.ring
    simple = arguments.layout == "contiguous" and arguments.documents is None and not uneven
    if max(queries, keys) > _MOST_TOKENS and not simple:
        raise InputError(
            "--query" if queries > _MOST_TOKENS else "--kv",
            f"{max(queries, keys)} tokens are too many for documents, layouts, and lengths that the ring cannot divide",
            f"Pass at most {_MOST_TOKENS}",
        )


def _packed(arguments: argparse.Namespace, batch: int, tokens: int) -> dict[str, np.ndarray]:
    """The segment ids that `--documents` asks for, and positions for `--restart-positions`, in layout order."""
    if arguments.documents is None:
        if arguments.restart_positions:
            raise InputError("--restart-positions", "is given without documents", "Pass --documents too")
        return {}
    if arguments.kv is not None and arguments.kv[0] != tokens:
        fact = f"packs queries and keys alike, and there are {tokens} queries and {arguments.kv[0]} keys"
        raise InputError("--documents", fact, "Pass as many keys as queries")
    if arguments.layout != "contiguous":
        refuse_indivisible("query", tokens, canonical(arguments.layout), arguments.ring)
    packed = MaskInfo.from_documents(arguments.documents, tokens, arguments.restart_positions)
    ids, positions = (
        None if x is None else to_layout(np.asarray(x), arguments.layout, arguments.ring)
        for x in (packed.q_segment_ids, packed.q_positions)
    )
    found = {"q_segment_ids": np.repeat(np.asarray(ids), batch, 0)}
    return found if positions is None else found | {"q_positions": positions[0]}


def _made(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options whose values are made here: a dropout seed, and a mask builder for `--prefix` or `--mask-builder`."""
    made: dict[str, Any] = {"dropout_seed": 0} if arguments.dropout_prob else {}
    if arguments.prefix is not None:
        made["mask_builder"] = functools.partial(_prefix, arguments.prefix)
    if arguments.mask_builder is not None:
        made["mask_builder"] = _imported(arguments.mask_builder)
    return made


def _prefix(length: int, *_: int) -> masks.Mask:
    return masks.Prefix(length) | masks.Causal()


def _imported(path: str) -> Callable[..., Any]:
    remedy = "Pass MODULE:FUNCTION of an importable module"
    if not all(path.partition(":")):
        raise InputError("--mask-builder", f"got {path!r}", remedy)
    try:
        return imported(path)
    except (Exception, SystemExit) as error:  # the module may raise anything
        raise InputError("--mask-builder", f"cannot load {path!r} ({in_one_line(error)})", remedy) from error
