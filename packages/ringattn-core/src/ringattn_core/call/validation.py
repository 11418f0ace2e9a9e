# SPDX-License-Identifier: Apache-2.0
"""Checks that the arguments of a call fit together, and makes the call in canonical form."""

import os
from collections.abc import Mapping
from typing import Any, Final

import jax
import numpy as np

from ..backends.discovery import tool
from ..contract.call import Call
from ..errors import InputError
from ..masks import Reach
from ..placement import arrays, axes
from ..placement import layout as layouts
from ..placement.platforms import refuse_different_devices
from ..placement.split import AXIS_NAMES
from .checks import Sizes, refuse_misfit
from .key_heads import own_key_heads
from .mesh_roles import refuse_repeated_indices
from .options import canonical
from .selected import refuse_straddling, with_size

CHECK: Final = "RINGATTN_CHECK"
DTYPES: Final = ("float32", "float16", "bfloat16")


def validated(query: Any, key: Any, value: Any, ranks: int | None = None, **given: Any) -> Call:
    """The call in canonical form, from operands and options by name. Raises if they do not fit together.

    By default (`ranks=None`) the call is made inside a `shard_map`, and arrays are those of one rank of `axis_name`.
    Outside, the arrays are one of `ranks` shards of the sequence; 1 means global arrays.
    """
    call, sizes = fitted({"query": query, "key": key, "value": value}, given, ranks)
    if ranks is not None:
        return call
    layout, said_by = (
        (call.placement.balance, "balance") if call.placement.balance else (call.placement.layout, "layout")
    )
    for name, length in zip(("query", "key"), sizes.lengths, strict=True):
        layouts.refuse_indivisible(name, length, layout, sizes.lengths[0] // call.query.shape[1], said_by)
    refuse_straddling(call, sizes.lengths[1] // call.key.shape[1], call.key.shape[1])
    return call.with_shared_gradients().placed(axis_name=call.placement.roles.sequence or None)


def fitted(
    operands: Mapping[str, Any], given: Mapping[str, Any], ranks: int | None, whole_queries: bool = False
) -> tuple[Call, Sizes]:
    """The call in canonical form, and the sizes of its operands. Raises if operands and options do not fit together.

    Errors call query, key and value by their names in `operands`. `ranks` is as in `validated`, where lengths are
    checked too. With `whole_queries`, every rank has all queries.
    """
    found, sizes = _operands(operands, given, ranks, whole_queries)
    q, k, v = found.values()
    checks = _checks()
    options = canonical({**given, "check_positions": given.get("check_positions") if checks else None}, sizes)
    _pair(options, ("q_segment_ids", "kv_segment_ids"), q, k)
    if options.get("query_offset") is None:
        _pair(options, ("q_positions", "kv_positions"), q, k)
    elif options.get("q_positions") is not None:
        raise InputError("query_offset", "is given beside q_positions", "Add it to the positions, or leave these out")
    dropout = options.get("dropout_prob")
    if dropout and options.get("dropout_seed") is None:
        raise InputError(
            "dropout_seed", f"is missing with dropout_prob={dropout}", "Pass an integer, a new one each step"
        )
    if not dropout:
        options["dropout_seed"] = None
    call = Call.of(q, k, v, with_size(options, sizes.lengths[1]))
    _refuse_broken_promise(call, sizes.lengths)
    if call.placement.balance is not None and call.placement.layout != "contiguous":
        fact = f"{call.placement.balance!r} is for arrays in contiguous order, but layout={call.placement.layout!r}"
        raise InputError("balance", fact, "Leave balance out: the work is balanced in that layout")
    if ranks is None:
        refuse_different_devices(
            found | {name: x for name, x in call.arrays.items() if name not in ("query", "key", "value")}
        )
        refuse_repeated_indices(call)
    return checks.watched(call, of_cache="key_cache" in operands, local=ranks is None) if checks else call, sizes


def _checks() -> Any:
    """The module that checks calls at run time if `RINGATTN_CHECK=1`; `None` if the variable is 0 or unset."""
    said = os.environ.get(CHECK, "").strip() or "0"
    if said not in ("0", "1"):
        raise InputError(f"environment variable {CHECK}", f"got {said!r}", "Set it to 1 or 0, or unset it")
    return tool("check", f"{CHECK}=1") if said == "1" else None


def _operands(
    given: Mapping[str, Any], options: Mapping[str, Any], ranks: int | None, whole_queries: bool
) -> tuple[dict[str, jax.Array], Sizes]:
    """Query, key and value as arrays, and their sizes. Raises unless they fit together and the axis names are valid.

    Where every rank holds all key heads, only those of this rank are returned.
    """
    ring, batch, heads = (axes.names(options.get(name), name) for name in AXIS_NAMES)
    found = {name: arrays.as_array(name, x) for name, x in given.items()}
    head_ranks, head_axes, whole_keys = 1, (), None
    if ranks is None and heads and all(x.ndim == 4 for x in found.values()):
        query, *others = found
        own = {name: own_key_heads(found[query], found[name], heads) for name in others}
        whole_keys = next((found[name].shape[2] for name in others if own[name] is not found[name]), None)
        found |= own
    _refuse_misfits(found)
    if ranks is None:
        ranks, _, head_ranks = (
            axes.size(named, name) for name, named in zip(AXIS_NAMES, (ring, batch, heads), strict=True)
        )
        head_axes = heads
    q, k, _ = found.values()
    lengths = q.shape[1] * (1 if whole_queries else ranks), k.shape[1] * ranks
    return found, Sizes(
        of=dict(zip("BTNHSK", (*q.shape, *k.shape[1:3]), strict=True)) | {"S_GLOBAL": lengths[1]},
        lengths=lengths,
        heads=(q.shape[2] * head_ranks, whole_keys or k.shape[2] * head_ranks),
        head_axes=head_axes,
    )


def _refuse_misfits(given: dict[str, jax.Array]) -> None:
    """Raises unless query, key and value fit together. Errors call them by their names in `given`."""
    (query, q), (key, k), _ = given.items()
    if q.dtype.name not in DTYPES:
        raise InputError(query, f"has dtype {q.dtype}", f"Cast query, key and value to one of {', '.join(DTYPES)}")
    sizes: dict[str, int] = {}
    for (name, x), wanted in zip(given.items(), (arrays.Query, arrays.Key, arrays.Value), strict=True):
        if not all(isinstance(size, int) for size in x.shape):
            remedy = "Export one program for each shape: kernels must know all sizes"
            raise InputError(name, f"has shape {x.shape}, with symbolic sizes", remedy)
        refuse_misfit(name, x, wanted, sizes)
        if 0 in x.shape:
            raise InputError(name, f"has shape {x.shape}, which is empty", "Every axis must be at least 1")
        if x.dtype != q.dtype:
            raise InputError(name, f"has dtype {x.dtype} but {query} has {q.dtype}", "Cast all three to one dtype")
        sizes |= zip(arrays.letters(wanted), x.shape, strict=True)
    if q.shape[2] % k.shape[2]:
        raise InputError(
            key,
            f"has {k.shape[2]} heads, which do not divide the {q.shape[2]} of {query}",
            "Query heads share key heads in equal groups",
        )


def _pair(found: dict[str, Any], names: tuple[str, str], q: jax.Array, k: jax.Array) -> None:
    """If one array of a pair is missing, the other serves both. Raises if queries and keys are not equally many."""
    missing = [name for name in names if found.get(name) is None]
    if len(missing) != 1:
        return
    (other,) = missing
    (given,) = set(names) - {other}
    if q.shape[1] != k.shape[1]:
        raise InputError(
            given, f"is given alone, but there are {q.shape[1]} queries and {k.shape[1]} keys", f"Pass {other} too"
        )
    found[other] = found[given]


def _refuse_broken_promise(call: Call, lengths: tuple[int, int]) -> None:
    """Raises if some query sees a key beyond `max_distance` by causality, window and chunk, and no array forbids it.

    Queries after the last key are left out, as if there were none.
    """
    hidden = any(name in call.arrays for name in ("q_segment_ids", "kv_first", "attention_mask", "selected", "bias"))
    if call.placement.max_distance == Reach() or hidden or call.mask_builder is not None or not call.natural:
        return
    last, positions = lengths[1] - 1, np.arange(min(lengths), dtype=np.int32)
    low, high = call.reach.bounds(positions)
    left = positions - (0 if low is None else low.clip(min=0))
    right = (last if high is None else high.clip(max=last)) - positions
    promises = call.placement.max_distance.sides
    for side, promised, sees in zip(("left", "right"), promises, (left.max(), right.max()), strict=True):
        if promised is not None and sees > promised:
            raise InputError(
                "max_distance",
                f"promises {promised} on the {side}, but the masks let a query see a key {sees} tokens away there",
                f"Pass at least {sees}, or the segment ids, positions or mask that forbid such keys",
            )
