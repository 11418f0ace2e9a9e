# SPDX-License-Identifier: Apache-2.0
"""`balance="zigzag"` changes no result of contiguous arrays, and gives every rank of a causal ring equal work."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ringattn_core import Backend, Feature, per_shard, ring_attention
from ringattn_core.backends import discovery
from ringattn_core.errors import InputError
from ringattn_core.placement.layout import Shards
from ringattn_testing.rings import close, graded, mesh_of, query_key_value

B, T, N, K, H = 2, 48, 4, 2, 8
OPERANDS = QUERY, KEY, VALUE = query_key_value(B, T, N, K)
IDS = np.sort(np.random.default_rng(0).integers(-1, 3, (B, T))).astype(np.int32)
SEEN = np.random.default_rng(1).random((B, 1, T, T)) < 0.8
# What all strategies move between ranks, and what they differentiate beside the operands.
EVERY: dict[str, Any] = {
    "q_segment_ids": IDS, "attention_mask": SEEN, "sliding_window": (20, 0), "logits_soft_cap": 2.0,
    "dropout_prob": 0.2, "dropout_seed": 3,
}  # fmt: skip
FLOATS: dict[str, Any] = {
    "bias": jax.random.normal(jax.random.key(9), (1, N, T, T)),
    "alibi_slopes": jnp.linspace(0.1, 0.5, N),
    "softmax_aux": jnp.linspace(-1.0, 1.0, 2 * N).reshape(N, 2),
}
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


@pytest.mark.parametrize(
    ("ranks", "kind", "length"), [(1, AUTO, 48), (2, EXPLICIT, 48), (3, AUTO, 46), (4, EXPLICIT, 44), (8, EXPLICIT, 48)]
)
def test_a_causal_ring_computes_what_it_computes_in_contiguous_order(ranks: int, kind: AxisType, length: int) -> None:
    """A length that the ring does not divide into two chunks a rank is padded."""
    attend, operands = functools.partial(ring_attention, causal=True), [x[:, :length] for x in OPERANDS]
    mesh = mesh_of(kind, sp=ranks)
    balanced = functools.partial(attend, balance="zigzag", mesh=mesh, axis_name="sp")
    # If the ring divides the length, the arrays are already sharded, also those that the call pads.
    placed = operands if length % ranks else jax.device_put(operands, NamedSharding(mesh, P(None, "sp")))
    close(graded(balanced, *placed), graded(attend, *operands), 5e-5)


def with_everything(floats: Any, *operands: Any, **over: Any) -> Any:
    return ring_attention(*operands, causal=True, **EVERY, **floats, **over)


@functools.cache
def everything_on_one_device() -> Any:
    return graded(with_everything, FLOATS, *OPERANDS)


@pytest.mark.parametrize(
    ("strategy", "kind", "axis"),
    [
        ("ring", EXPLICIT, ("outer", "inner")),
        ("ulysses", AUTO, ("inner", "outer")),
        ("all_gather", EXPLICIT, ("outer", "inner")),
    ],
)
def test_all_arrays_of_tokens_follow_with_every_strategy(strategy: str, kind: AxisType, axis: tuple[str, ...]) -> None:
    """Over two axes too: ulysses goes over the inner one, and the ring over the outer."""
    ring: dict[str, Any] = {"mesh": mesh_of(kind, dp=2, inner=2, outer=2), "axis_name": axis, "strategy": strategy}
    balanced = functools.partial(with_everything, balance="zigzag", **ring)
    close(graded(balanced, FLOATS, *OPERANDS), everything_on_one_device(), 5e-5)


@pytest.mark.parametrize(("ranks", "check_vma"), [(4, True), (2, False)])
def test_in_ones_own_shard_map_and_with_the_log_sum_exp(ranks: int, check_vma: bool) -> None:
    mesh, spec = mesh_of(sp=ranks), P(None, "sp")
    options: dict[str, Any] = {"causal": True, "return_lse": True, "dropout_prob": 0.3, "dropout_seed": 3}

    def local(*x: Any) -> Any:
        ids = jnp.zeros(x[0].shape[:2], jnp.int32)  # the same on all ranks
        return ring_attention(*x, q_segment_ids=ids, axis_name="sp", balance="zigzag", **options)

    specs = (spec, P(None, None, "sp"))
    split = jax.shard_map(local, mesh=mesh, in_specs=(spec,) * 3, out_specs=specs, check_vma=check_vma)
    close(graded(split, *OPERANDS), graded(functools.partial(ring_attention, **options), *OPERANDS), 5e-5)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_each_rank_keeps_a_chunk_and_holds_its_mirror_image_too(ranks: int) -> None:
    held = Shards("zigzag", ranks, folded=True).order(4 * ranks).reshape(ranks, 2, 2)
    chunks = [[2 * rank, 2 * ranks - 1 - 2 * rank] for rank in range(ranks)]
    np.testing.assert_array_equal(held[..., 0] // 2, np.sort(chunks, 1))
    assert {int(x.sum()) for x in held.reshape(ranks, 4)} == {2 * (4 * ranks - 1)}


def test_each_rank_sends_half_of_its_shards() -> None:
    mesh = mesh_of(sp=4)
    split = NamedSharding(mesh, P(None, "sp"))
    operands = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split) for x in (QUERY, KEY, VALUE)]

    def sent(**options: Any) -> list[str]:
        f = jax.jit(lambda *x: ring_attention(*x, causal=True, mesh=mesh, axis_name="sp", **options))
        text = f.lower(*operands).compile().as_text() or ""
        assert "all-gather" not in text and "all-reduce" not in text
        return sorted(re.findall(r"= (\S+?)\{\S* collective-permute(?:-start)?\(", text))

    exchanged = [f"f32[{B},{T // 8},{heads},{H}]" for heads in (N, N, K, K)]
    assert sent(balance="zigzag") == sorted([*sent(layout="zigzag"), *exchanged])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"balance": "striped"}, "balance: got 'striped'"),
        ({"balance": "zigzag", "layout": "striped"}, "balance: 'zigzag' is for arrays in contiguous order"),
    ],
)
def test_another_order_is_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        ring_attention(QUERY, KEY, VALUE, causal=True, **options)


def test_an_odd_shard_and_a_backend_with_its_own_ring_are_refused() -> None:
    attend = per_shard("xla")
    with pytest.raises(InputError, match="balance: 'zigzag' on 4 ranks needs lengths that 8 divides, but"):
        jax.vmap(lambda x: attend(x, x, x, axis_name="sp", balance="zigzag"), axis_name="sp")(jnp.ones((4, 1, 3, 2, 8)))
    own = Backend(name="own", api=1, platforms=("cpu",), features={*Feature}, ring="somewhere:else")
    with (
        discovery.registered(own, lambda query, key, value, **_: query),
        pytest.raises(InputError, match="balance: 'zigzag' needs a kernel of one block, but backend 'own' drives"),
    ):
        ring_attention(QUERY, KEY, VALUE, causal=True, balance="zigzag", backend="own")
