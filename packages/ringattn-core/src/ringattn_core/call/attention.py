# SPDX-License-Identifier: Apache-2.0
"""The function `ring_attention`: exact attention over a sequence that is sharded over a ring of devices."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from ..config import BwdParams, FwdParams, RingAttentionConfig, backend_and_params
from ..contract.expansion import expansion
from ..contract.signature import RingKernel
from ..errors import InputError, MeshError
from ..masks.builder import Builder
from ..masks.info import MaskInfo
from ..placement import arrays
from ..placement.axes import AxisName
from ..placement.split import split_of
from ..strategies import Strategy
from .dispatch import answer, chosen
from .entry import entry
from .mesh_roles import split_of_call
from .options import options_in
from .sharding import sharded
from .validation import validated


@entry
def ring_attention(
    query: arrays.Query,
    key: arrays.Key | Any,
    value: arrays.Value | None = None,
    softmax_aux: arrays.Sinks | arrays.SharedSinks | None = None,
    bias: arrays.Bias | None = None,
    *,
    causal: bool = False,
    sliding_window: int | tuple[int | None, int | None] | None = None,
    chunk_size: int | None = None,
    q_segment_ids: arrays.QueryIds | None = None,
    kv_segment_ids: arrays.KeyIds | None = None,
    q_positions: arrays.QueryPositions | None = None,
    kv_positions: arrays.KeyPositions | None = None,
    kv_range: tuple[Any, Any] | None = None,
    query_offset: int | arrays.QueryOffset | None = None,
    mask_info: MaskInfo | None = None,
    attention_mask: arrays.DenseMask | None = None,
    selected: arrays.Selected | None = None,
    selected_size: int = 1,
    mask_builder: Builder | None = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: arrays.PerHead | None = None,
    dropout_prob: float = 0.0,
    dropout_seed: int | arrays.Seed | None = None,
    axis_name: AxisName = None,
    batch_axis_name: AxisName = None,
    head_axis_name: AxisName = None,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Sequence[PartitionSpec] | None = None,
    out_specs: PartitionSpec | Sequence[PartitionSpec] | None = None,
    layout: str = "contiguous",
    balance: Literal["zigzag"] | None = None,
    strategy: Strategy = "ring",
    max_distance: int | tuple[int | None, int | None] | None = None,
    precision: str | jax.lax.Precision | None = None,
    fused_backward: bool = False,
    return_lse: bool = False,
    return_max_logits: bool = False,
    expand: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    expand_params: Any = None,
    check_positions: arrays.QueryPositions | None = None,
    backend: str | Sequence[str] | None = None,
    cfg: RingAttentionConfig | dict[str, Any] | None = None,
) -> Any:
    """Softmax attention over a sequence that is split over a ring of devices.

    Outputs and gradients are exact up to rounding, for every ring size, layout and backend. With `mesh`, or under
    `jax.set_mesh`, arrays are global and the call splits them. Inside your own `jax.shard_map`, arrays are local: leave
    `mesh` out, and name every mesh axis that splits them. Without a mesh and without `axis_name`, the call runs on one
    device.

    Letters are axes: batch `B`, query tokens `T`, key tokens `S`, query heads `N`, key heads `K`, head sizes `H` and
    `Hv`. The length of an axis `b`, `n` or `t` is full or 1. All masks that are given are ANDed. Causality,
    window and chunk compare global positions.

    Args:
        query: `[B, T, N, H]`, in float32, float16 or bfloat16.
        key: `[B, S, K, H]`. `K` divides `N`, and query head `n` reads key head `n // (N // K)`.
        value: `[B, S, K, Hv]`.
        softmax_aux: Attention sinks: logits that enter the denominator of the softmax and have no value. `[N]` for one
            sink a head, `[n]` for `n` sinks that all heads share, or `[N, n]`. If your own `jax.shard_map` splits the
            heads, split the first axis of `[N, n]` too, but not `[N]` or `[n]`: there `N` counts all heads.
        bias: Added to the scores, `[b, n, t, S_global]`. Its columns are all keys of the sequence, in natural order. An
            entry below -1e5 forbids its pair, as -inf does.
        causal: A query sees no key after it.
        sliding_window: `(left, right)`, how far a query sees to each side, both ends inclusive. `None` is unbounded.
            One number is both sides.
        chunk_size: A query sees the keys of its own chunk of this many positions, and none after itself.
        q_segment_ids: `[B, T]` integers. A query sees the keys with its own id; a negative id is padding.
        kv_segment_ids: `[B, S]` integers. If only one of the two is given, it serves both.
        q_positions: `[T]` or `[B, T]` integers, which masks and ALiBi compare. By default, the index in the
            sequence.
        kv_positions: `[S]` or `[B, S]`. If only one of the two is given, without `query_offset`, it serves both.
        kv_range: `(first, last)`: a query sees only keys at positions from the first to the last, both inclusive. Two
            integer arrays, `[T]`, `[b, T]` or `[b, n, T]`, or numbers, which may be traced. A query whose first is
            beyond its last sees no key.
        query_offset: The position of the first query: an integer, which may be traced, or one for each row, `[B]`. Not
            with `q_positions`.
        mask_info: A `MaskInfo`: segment ids, positions, ranges and a dense mask as one pytree.
        attention_mask: A dense mask, true where a query sees a key, `[b, n, T, S_global]`.
        selected: The keys that each query chooses, `[B, T, groups, n]` integers, beside all masks: the indices in the
            sequence of `n` keys, or of blocks of `selected_size` keys. -1 is no block; a repeated id counts once.
            `groups` is 1 if all heads share a choice, `K` if those of a key head do, or `N`. Ranks of a ring hold the
            ids of their own queries.
        selected_size: The number of keys of a block: block `i` has the keys from `i * selected_size` on. It divides the
            shard of a rank (in zigzag order, each of its two chunks), and is 1 in striped order.
        mask_builder: `(q_len, kv_len, num_heads, head_idx, num_reps) -> mask`, called for every head with global
            lengths; `num_reps` is `N // K`. See `ringattn_core.masks`.
        softmax_scale: The factor of the scores, by default `H ** -0.5`.
        logits_soft_cap: Scores become `cap * tanh(score / cap)`. A cap is at most 1e30.
        alibi_slopes: `[N]`. `slope * |i - j|` is subtracted from the score of positions `i` and `j`.
        dropout_prob: The probability of dropping an attention weight, rounded down to a multiple of 2^-16.
        dropout_seed: One integer. The same seed drops the same weights on every ring, layout and backend.
        axis_name: The mesh axis that splits the sequence: the ring. With strategy "ring", a tuple of names is rings
            inside rings, the innermost over the last axis, which should have the fastest links. In your own
            `jax.shard_map`, name them in the order in which the specs have them: JAX does not tell which shard a rank
            holds, so another order is silently wrong.
        batch_axis_name: The mesh axis, or axes, that split the batch; `()` means none. With `mesh`, axes named dp,
            fsdp, data or replica are the default.
        head_axis_name: The mesh axis, or axes, that split the heads; `()` means none. With `mesh`, axes named tp, model
            or tensor are the default. In your own `jax.shard_map` with `check_vma=False`, split key heads as you split
            query heads: JAX does not tell whether a rank holds all key heads. If their number divides that of its
            query heads, they count as its own.
        mesh: The mesh over which the call splits its global arrays.
        in_specs: Three equal `PartitionSpec`s, of query, key and value, instead of `batch_axis_name` and
            `head_axis_name`. The specs of all other arrays follow from them. Only with `mesh`.
        out_specs: The `PartitionSpec` of the output, which is that of the query, so it may always be left out. With
            `return_lse` or `return_max_logits`, the specs of the other results may follow it in a tuple.
        layout: The order of the tokens in the arrays: "contiguous", "zigzag" or "striped". `to_layout` reorders arrays.
        balance: "zigzag" computes in zigzag order although arrays are in contiguous order, so that a causal ring has
            equal work on every rank. Ranks exchange half of each shard before attention, and of its output after.
        strategy: "ring", "all_gather" (a rank gathers all keys at once), "ulysses" (ranks exchange heads for tokens) or
            "auto" ("ulysses" if masks by position and `max_distance` leave out no keys, the ranks of the last axis
            divide the key heads, and there is no `expand`; else the ring).
        max_distance: Your promise that no query sees a key farther away in the sequence than this; one number, or
            `(left, right)` as in `sliding_window`. It compares indices in the sequence, not positions. The ring
            then leaves out hops and rows of keys beyond it, also with segment ids and with positions of your own. It is
            no mask, and only `RINGATTN_CHECK=1` checks it at run time: a query that does see a farther key may silently
            lose it.
        precision: The precision of float32 matrix products: "default", "high" or "highest". By default, products are as
            exact as sums in float32.
        fused_backward: Allows a backward pass in one kernel that may add in any order, so that the last bits differ
            from run to run.
        return_lse: Also returns the natural logarithm of the denominator of the softmax.
        return_max_logits: Also returns, for each head, the largest score over all queries, all keys that they see, and
            the batch. It includes scale, soft cap, bias and ALiBi, not sinks or dropout, and has no gradient.
        expand: `(x, expand_params) -> (key, value)`, for each token by itself. Pass `x`, an array or a pytree of arrays
            `[B, S, ...]`, in place of `key`, and no `value`: `x` travels, and each rank computes keys and values on
            arrival, in the backward pass too. With strategy "ulysses", ranks expand before they exchange heads.
        expand_params: A pytree of arrays that `expand` reads, differentiated like `x`. In your own `jax.shard_map`,
            split it over the heads as you split the queries.
        check_positions: `[T]` or `[B, T]`, the index in the sequence of each query, in the order of the arrays. With
            `RINGATTN_CHECK=1` the call raises unless the layout and the ring give the same; a negative index is not
            compared. Otherwise it is ignored, and costs nothing.
        backend: The name of a backend, or several names to try in order. By default, the best one that is installed.
        cfg: A `RingAttentionConfig`, or a dict of its fields: tile sizes.

    Returns:
        The output `[B, T, N, Hv]`, in the dtype of the query. With `return_lse`, `(out, lse)` with `lse` `[B, N, T]` in
        float32. A query that sees no key has output 0. With `return_max_logits`, the last result is `max_logits` `[N]`
        in float32: `(out, max_logits)` or `(out, lse, max_logits)`. It is -inf for a head whose queries see no key.

    Raises:
        ringattn_core.errors.InputError: An argument has a value that no backend accepts.
        ringattn_core.errors.MeshError: The mesh or an axis name does not fit the call.
        ringattn_core.errors.UnsupportedFeatureError: The named backend lacks an option or head size of the call.
        ringattn_core.errors.NoBackendError: No installed backend can run the call.
    """
    given = options_in(locals())
    backend, params = backend_and_params(cfg, backend)
    given |= _held(mask_info, given) | params
    key, value, expand_fields = _expanded(key, value, expand, expand_params)
    positions = {name: given[name] for name in ("q_positions", "kv_positions")}
    mesh = split_of_call(mesh, given, {"query": query, "key": key, "value": value, **positions}).mesh
    try:
        call = validated(query, key, value, **given, ranks=None if mesh is None else 1)
    except InputError as error:
        if expand_fields and error.argument in ("key", "value"):
            raise InputError("expand", f"gives a {error.argument} that {error.fact}", error.remedy) from None
        raise
    if expand_fields and call.key.shape != key.shape:
        fact = f"gives {key.shape[2]} key heads, but this rank's queries need only {call.key.shape[2]} of them"
        raise InputError("expand", fact, "Split expand_params over head_axis_name too")
    call = dataclasses.replace(call, **expand_fields)
    if mesh is not None:
        return sharded(call, backend, mesh, in_specs, out_specs)
    if in_specs is not None or out_specs is not None:
        raise MeshError("in_specs and out_specs say how a mesh splits global arrays. Pass mesh= too")
    return answer(chosen(backend, call), call)


def _expanded(key: Any, value: Any, expand: Any, params: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Key and value, and the fields of a `Call` for `expand`; then key and value serve for their shapes only."""
    if expand is None:
        if params is not None:
            raise InputError("expand_params", "is given without expand", "Pass expand too")
        if value is None:
            raise InputError("value", "is missing", "Pass it, or expand, which computes key and value")
        return key, value, {}
    if value is not None:
        raise InputError("value", "is given beside expand, which computes it", "Leave it out")
    found, latents, leaves = expansion(expand, key, params)
    key, value = jax.lax.stop_gradient(found(latents, found.narrowed(leaves)))
    return key, value, {"expand": found, "latents": latents, "expand_params": leaves}


def per_shard(backend: str) -> RingKernel:
    """Makes the per-shard `ring_attention` that a backend's package exports.

    Args:
        backend: The name of the backend that runs every call of the function.
    """

    @entry
    def ring_attention(
        query: arrays.Query,
        key: arrays.Key,
        value: arrays.Value,
        q_segment_ids: arrays.QueryIds | None = None,
        kv_segment_ids: arrays.KeyIds | None = None,
        softmax_aux: arrays.Sinks | arrays.SharedSinks | None = None,
        bias: arrays.Bias | None = None,
        mask_builder: Builder | None = None,
        sliding_window: int | tuple[int | None, int | None] | None = None,
        chunk_size: int | None = None,
        causal: bool = False,
        logits_soft_cap: float | None = None,
        softmax_scale: float | None = None,
        axis_name: AxisName = None,
        fwd_params: FwdParams | dict[str, Any] | None = None,
        bwd_params: BwdParams | dict[str, Any] | None = None,
        fused_backward: bool = False,
        *,
        attention_mask: arrays.DenseMask | None = None,
        q_positions: arrays.QueryPositions | None = None,
        kv_positions: arrays.KeyPositions | None = None,
        query_offset: int | arrays.QueryOffset | None = None,
        alibi_slopes: arrays.PerHead | None = None,
        dropout_prob: float = 0.0,
        dropout_seed: int | arrays.Seed | None = None,
        batch_axis_name: AxisName = None,
        head_axis_name: AxisName = None,
        layout: str = "contiguous",
        precision: str | jax.lax.Precision | None = None,
        return_lse: bool = False,
        strategy: str = "ring",
        max_distance: int | tuple[int | None, int | None] | None = None,
        balance: str | None = None,
        return_max_logits: bool = False,
        kv_range: tuple[Any, Any] | None = None,
        selected: arrays.Selected | None = None,
        selected_size: int = 1,
    ) -> Any:
        """Exact attention of one rank's queries to the keys of all ranks of a ring, on the backend of this package.

        The arguments are those of `ringattn_core.ring_attention`, in the order of `ejkernel`; `fwd_params` and
        `bwd_params` are those of its `cfg`. Arrays are local: call it inside `jax.shard_map`, or on one device.
        """
        given = options_in(locals())
        positions = {name: given[name] for name in ("q_positions", "kv_positions")}
        split_of(None, given, {"query": query, "key": key, "value": value, **positions})
        call = validated(query, key, value, **given)
        return answer(chosen(backend, call), call)

    return ring_attention


def _held(mask_info: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arrays of `mask_info` by name; raises for an array that `given` has too."""
    if mask_info is None:
        return {}
    if not isinstance(mask_info, MaskInfo):
        raise InputError("mask_info", f"got {type(mask_info).__name__}", "Pass a ringattn_core.MaskInfo")
    held = {name: x for name, x in vars(mask_info).items() if x is not None}
    for name in held:
        if given[name] is not None:
            raise InputError(name, "is given twice, in mask_info and by itself", "Pass one of them")
    return held
