# SPDX-License-Identifier: Apache-2.0
"""`haliax.nn.attention.dot_product_attention` over a ring, on arrays with named axes, without importing haliax."""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from ringattn_core import ring_attention
from ringattn_core.errors import InputError

from .masks import with_masks
from .options import checked, errors_in_terms_of, refuse

RENAMED: Final = {"attention_mask": "mask"}


class Roles(NamedTuple):
    """The axis names of a call, by their meaning. `groups` are the axes of query heads that share one key head."""

    batch: tuple[str, ...]
    heads: tuple[str, ...]
    groups: tuple[str, ...]
    queries: str
    keys: str
    sizes: dict[str, int]

    def array(self, argument: str, x: Any, order: Sequence[Sequence[str]]) -> jax.Array:
        """The array of `x` with one axis for each entry of `order`, which names the axes that are flattened into it.

        If `x` has none of an entry's names, that axis has length 1; if only some, `x` is broadcast to the others.
        """
        names = [axis.name for axis in x.axes]
        known = [name for part in order for name in part]
        if unknown := [name for name in names if name not in known]:
            raise InputError(argument, f"has the axes {unknown}", f"It may have the axes {known}")
        array = jnp.transpose(x.array, [names.index(name) for name in known if name in names])
        array = jnp.expand_dims(array, [i for i, name in enumerate(known) if name not in names])
        full = [[self.sizes[name] if {*part} & {*names} else 1 for name in part] for part in order]
        return jnp.broadcast_to(array, list(chain(*full))).reshape([math.prod(part) for part in full])

    def rows(self, argument: str, x: Any, *order: Sequence[str]) -> jax.Array:
        """Like `array`, with the batch as first axis, to which `x` is broadcast."""
        array = self.array(argument, x, (self.batch, *order))
        return jnp.broadcast_to(array, (math.prod(self.sizes[name] for name in self.batch), *array.shape[1:]))


def dot_product_attention(
    KPos: Any,
    Key: Any,
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    bias: Any = None,
    attention_dtype: Any = None,
    precision: Any = None,
    *,
    QPos: Any = None,
    **ring: Any,
) -> Any:
    """Computes haliax's `dot_product_attention`; the result has the query's axes, the head size being the value's.

    It also takes the options of `ring_attention`. Of the axes that query and key share, the first is the batch, and the
    others are key heads; axes of the query alone are the query heads that share a key head. If there are any, `QPos`
    names the axis of query positions. Inside your own `shard_map` use `ring_attention` itself.
    """
    roles = roles_of(query, key, KPos, Key, QPos)
    refuse_other_dtype(attention_dtype, query)
    options = checked(ring, RENAMED) | ({} if precision is None else {"precision": precision})
    with errors_in_terms_of(RENAMED):
        return attend(roles, (query, key, value), _name(Key), mask, bias, options)


def roles_of(query: Any, key: Any, KPos: Any, Key: Any, QPos: Any) -> Roles:
    """What each axis means, from the names that query and key share."""
    keys, size = _name(KPos), _name(Key)
    ours, theirs = ([axis.name for axis in x.axes] for x in (query, key))
    shared = [name for name in ours if name in theirs and name != size]
    own = [name for name in ours if name not in theirs]
    queries: Any = own[0] if QPos is None and len(own) == 1 else None if QPos is None else _name(QPos)
    if queries not in own or keys not in theirs or keys in ours:
        fact = f"has the axes {ours}, and key has {theirs}"
        raise InputError(
            "query", fact, "Name the query's positions, which the key lacks, by QPos, and the key's by KPos"
        )
    sizes = {axis.name: axis.size for x in (query, key) for axis in x.axes}
    groups = tuple(name for name in own if name != queries)
    return Roles(tuple(shared[:1]), tuple(shared[1:]), groups, queries, keys, sizes)


def attend(roles: Roles, arrays: tuple[Any, Any, Any], size: str, mask: Any, bias: Any, options: dict[str, Any]) -> Any:
    """Runs `ring_attention` on named arrays, with a dense mask and a bias that may be named arrays too."""
    query, key, value = arrays
    heads = (*roles.heads, *roles.groups)
    last = tuple(axis.name for axis in value.axes if axis.name not in (*roles.batch, *roles.heads, roles.keys))
    wide = roles._replace(sizes=roles.sizes | {axis.name: axis.size for axis in value.axes})
    q = roles.array("query", query, (roles.batch, (roles.queries,), heads, (size,)))
    k = roles.array("key", key, (roles.batch, (roles.keys,), roles.heads, (size,)))
    v = wide.array("value", value, (roles.batch, (roles.keys,), roles.heads, last))
    dense = (roles.batch, heads, (roles.queries,), (roles.keys,))
    added, allowed = (
        None if x is None else roles.array(name, x, dense) for name, x in (("bias", bias), ("mask", mask))
    )
    out = ring_attention(q, k, v, **with_masks(options, q, k, added, allowed))
    order = (*roles.batch, roles.queries, *heads, *last)
    out = out.reshape([wide.sizes[name] for name in order])
    wanted = [name for axis in query.axes for name in (last if axis.name == size else (axis.name,))]
    axes = {axis.name: axis for x in arrays for axis in x.axes}
    return type(query)(jnp.transpose(out, [order.index(name) for name in wanted]), tuple(axes[name] for name in wanted))


def refuse_other_dtype(attention_dtype: Any, query: Any) -> None:
    """Refuses a dtype for scores and softmax other than float32, which they have, and the query's own."""
    wanted = None if attention_dtype is None else jnp.dtype(attention_dtype)
    if wanted not in (None, jnp.float32, query.array.dtype):
        refuse({"attention_dtype": str(wanted)}, "Scores are float32; leave it out, or pass float32")


def _name(axis: Any) -> str:
    """The name of an axis, or of a sequence of one axis."""
    axes = [axis] if isinstance(axis, str) or hasattr(axis, "name") else list(axis)
    if len(axes) != 1:
        raise InputError("KPos", f"names {len(axes)} axes", "A ring goes over one axis; flatten them")
    return axes[0] if isinstance(axes[0], str) else axes[0].name
