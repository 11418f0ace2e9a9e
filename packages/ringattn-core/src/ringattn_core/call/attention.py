# SPDX-License-Identifier: Apache-2.0
"""The function `ring_attention`: exact attention over a sequence that is sharded over a ring of devices."""

import inspect
from typing import Any

import jax
from typing_extensions import Unpack

from ..backends.selection import select
from ..config import RingAttentionConfig
from ..errors import InputError, MeshError
from ..masks.info import MaskInfo
from ..placement import arrays, axes
from ..placement.mesh import surrounding
from ..placement.platforms import platform_of
from .dispatch import answer
from .options import DEFAULTS, Options, needs, refuse_unknown
from .sharding import sharded
from .validation import validated


def ring_attention(
    query: arrays.Query,
    key: arrays.Key,
    value: arrays.Value,
    softmax_aux: arrays.Sinks | arrays.SharedSinks | None = None,
    bias: arrays.Bias | None = None,
    **options: Unpack[Options],
) -> Any:
    """Softmax attention. Values and gradients are exact up to rounding, for every ring size, layout and backend.

    With `mesh`, arrays are global: mesh axes named dp, fsdp, data or replica split the batch, tp, model or tensor the
    heads, and `axis_name` the sequence. Lengths that the ring does not divide are padded (contiguous layout). Under
    `jax.set_mesh`, `axis_name` alone is enough. Inside your own `jax.shard_map`, arrays are local: leave `mesh` out,
    and name the mesh axes that split them. Without all of these, the call runs on one device.

    `causal`, `sliding_window` (both ends inclusive), `chunk_size`, segment ids, `mask_builder` and `attention_mask`
    are ANDed, on global positions. `softmax_aux` are attention sinks. `layout` is the order of the tokens in the arrays
    ("contiguous", "zigzag", "striped"); `to_layout` puts arrays in that order. With `two_way`, half of the key heads
    travel the other way round the ring, to use links in both directions. `strategy` is "ring", "all_gather" (all keys
    at once) or "ulysses" (ranks exchange heads for tokens). With `return_lse` the result is `(out, lse)`.
    """
    given: dict[str, Any] = dict(options)
    refuse_unknown(given, _NAMES)
    config, backend = config_of(given.pop("cfg", None)), given.pop("backend", None)
    mesh, in_specs, out_specs = (given.pop(name, None) for name in ("mesh", "in_specs", "out_specs"))
    given = _with_mask_info(given, given.pop("mask_info", None))
    if mesh is None:
        named = [name for argument in _OF_MESH for name in axes.names(given.get(argument), argument)]
        mesh = surrounding(named, [x for x in (query, key, value) if isinstance(x, jax.Array)])
    call = validated(
        query,
        key,
        value,
        softmax_aux=softmax_aux,
        bias=bias,
        fwd_params=config.fwd_params,
        bwd_params=config.bwd_params,
        ranks=None if mesh is None else 1,
        **given,
    )
    wanted = config.backend_name if backend is None else backend
    if mesh is not None:
        return sharded(call, wanted, mesh, in_specs, out_specs)
    if in_specs is not None or out_specs is not None:
        raise MeshError("in_specs and out_specs say how a mesh splits global arrays. Pass mesh= too")
    return answer(select(wanted, needs(call), platform_of(None, (call.query, call.key, call.value))), call)


_OF_MESH = ("axis_name", "batch_axis_name", "head_axis_name")
_NAMED = [p for p in inspect.signature(ring_attention).parameters.values() if p.kind is not p.VAR_KEYWORD]
_OPTIONS = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=DEFAULTS.get(name), annotation=kind)
    for name, kind in Options.__annotations__.items()
]
_NAMES = [parameter.name for parameter in (*_NAMED, *_OPTIONS)]
# so that editors and `help` show every option with its default
ring_attention.__signature__ = inspect.Signature([*_NAMED, *_OPTIONS])  # pyright: ignore[reportFunctionMemberAccess]


def config_of(cfg: Any) -> RingAttentionConfig:
    if cfg is None:
        return RingAttentionConfig()
    if isinstance(cfg, dict):
        return RingAttentionConfig.from_dict(cfg)
    if not isinstance(cfg, RingAttentionConfig):
        raise InputError("cfg", f"got {type(cfg).__name__}", "Pass a RingAttentionConfig, or a dict of its fields")
    return cfg


def _with_mask_info(options: dict[str, Any], mask_info: Any) -> dict[str, Any]:
    """Adds the arrays of `mask_info` to the options; raises for an array that is given in both."""
    if mask_info is None:
        return options
    if not isinstance(mask_info, MaskInfo):
        raise InputError("mask_info", f"got {type(mask_info).__name__}", "Pass a ringattn_core.MaskInfo")
    held = {name: x for name, x in vars(mask_info).items() if x is not None}
    for name in held:
        if options.get(name) is not None:
            raise InputError(name, "is given twice, in mask_info and by itself", "Pass one of them")
    return options | held
