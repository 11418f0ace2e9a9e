# SPDX-License-Identifier: Apache-2.0
"""Promises on a ring of one on Hopper: what is no number in K or V is found by the kernel itself, and mended then."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_reports import launches
from given_blocks import bias, make_block, with_option
from ringattn_core import ring_attention
from ringattn_core.backends import discovery
from ringattn_core.contract import nonfinite
from ringattn_core.contract.merge import empty
from ringattn_core.contract.protocol import Block, Own, Partial
from ringattn_triton import hopper, operands
from ringattn_triton.block import TritonKernel
from ringattn_triton.forward import forward
from ringattn_triton.kernels import hopper_look
from ringattn_triton.launch import compiling_for
from ringattn_triton.plugin import BACKEND
from ringattn_triton.schedules import Target

NAN, INFINITY = float("nan"), float("inf")
TARGET = Target("cuda", 90)
HALF = jnp.bfloat16
ROW = hopper_look.LOOK_WIDTH.value
PLACE = hopper_look.LOOK_ROWS.value // 2 * ROW
SHARE = hopper_look._SHARE.value * ROW
COUNTS = jnp.zeros(hopper.COUNTS, jnp.int32)
BESIDE = ["ringattn_table", "ringattn_hopper_forward", "ringattn_packing_if_bad", "ringattn_hopper_again"]
BEFORE = ["ringattn_looking", "ringattn_packing_if_bad", "ringattn_table", "ringattn_hopper_forward"]


class Packing(TritonKernel):
    """Has no look at keys and values, which core then packs."""

    counts = 0


@pytest.fixture(autouse=True)
def short_blocks_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be slow on a device is right all the same, and a test cannot have long blocks."""
    monkeypatch.setattr(hopper, "_too_little", lambda facts: False)


def alone(block: Block, k: jax.Array, v: jax.Array) -> Block:
    """The block as a ring of one has it. Were anything read from where core packs, it would show."""
    return dataclasses.replace(block, own=Own(k, v, COUNTS), kv=jnp.full((2, *k.shape), 3.0, k.dtype))


def computed(block: Block, partial: Partial, names: list[str]) -> Partial:
    """The result for Hopper, if it is launches of these names that give it."""
    run = jax.make_jaxpr(lambda b, p: forward.__wrapped__(b, p, TARGET))(block, partial)
    assert [call.name for call, _ in launches(run.jaxpr)] == names
    return forward.__wrapped__(block, partial, TARGET)


def same(got: Partial, want: Partial) -> None:
    np.testing.assert_array_equal(got.out, want.out)
    np.testing.assert_array_equal(got.lse, want.lse)


def set_at(x: jax.Array, place: int, value: float) -> jax.Array:
    return x.at[np.unravel_index(place, x.shape)].set(value)


def counted(k: jax.Array, v: jax.Array) -> list[int]:
    """What the programs of a launch that looks count."""
    batch, length, heads, dim = k.shape
    block = make_block(batch, 200, length, heads, heads, dim, dtype=k.dtype)
    block = alone(block, k, v)
    given, partial = operands.of(block), empty(block)
    _, counts = hopper._launched(given, block, partial, hopper._table(given, block), COUNTS, looks=True)
    return counts.tolist()


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("dtype", [HALF, jnp.float16])
@pytest.mark.parametrize("bad", [None, "keys", "values"])
@pytest.mark.parametrize("option", ["causal", "segments"])
def test_keys_and_values_are_read_where_they_are_unless_one_is_no_number(
    option: str, bad: str | None, dtype: Any, dim: int
) -> None:
    block = with_option(option, 200, 300, dim=dim, dtype=dtype)
    k, v = block.k, block.v
    if bad == "keys":
        k = k.at[1, 5, 1, dim - 1].set(-INFINITY).at[0, 299, 0, 0].set(NAN)
    elif bad == "values":
        v = v.at[0, 7, 0, 0].set(NAN).at[1, 3, 1, 5].set(INFINITY)
    packed = dataclasses.replace(block, kv=nonfinite.keys_and_values(k, v, poison=True))
    want = computed(packed, empty(block), BESIDE[:2])
    got = computed(alone(block, k, v), empty(block), BESIDE)
    assert np.isnan(want.lse).any() == (bad is not None) and np.isfinite(want.lse).any()
    same(got, want)
    assert got.found is not None and bool(got.found[hopper.FOUND_AT.value] > 0) == (bad is not None)


@pytest.mark.parametrize("added", ["a bias", "earlier keys"])
@pytest.mark.parametrize("bad", [False, True])
def test_where_a_kernel_has_no_room_or_something_to_continue_the_look_comes_before(bad: bool, added: str) -> None:
    block = with_option("causal", 200, 264, dim=128, dtype=HALF)
    partial = empty(block)
    if added == "a bias":
        block = dataclasses.replace(block, bias=jnp.asarray(bias(2, 4, 200, 264), HALF))
    else:
        partial = dataclasses.replace(partial, empty=False)
    k, v = block.k, block.v.at[1, 3, 1, 5].set(INFINITY if bad else 1)
    packed = dataclasses.replace(block, kv=nonfinite.keys_and_values(k, v, poison=True))
    want = computed(packed, partial, BEFORE[2:])
    assert np.isnan(want.lse).any() == bad
    got = computed(alone(block, k, v), partial, BEFORE)
    same(got, want)
    assert got.found is not None and bool(got.found[0] > 0) == bad


def test_the_portable_kernel_has_the_look_before() -> None:
    block = with_option("causal", 40, 36, dim=72)
    block = alone(block, block.k.at[1, 35, 0, 3].set(NAN), block.v)
    run = jax.make_jaxpr(lambda b, p: forward.__wrapped__(b, p, TARGET))(block, empty(block))
    assert [call.name for call, _ in launches(run.jaxpr)] == [*BEFORE[:3], "ringattn_forward"]
    found = forward.__wrapped__(block, empty(block), TARGET).found
    assert found is not None and found.tolist() == [1] + [0] * (hopper.COUNTS - 1)


@pytest.mark.parametrize("programs", [1, 2, 999])
@pytest.mark.parametrize("value", [NAN, -INFINITY])
@pytest.mark.parametrize(
    "place", [0, ROW - 1, 7 * ROW, PLACE - 1, PLACE, 3 * PLACE - 1, 3 * PLACE, SHARE - 1, SHARE, 3 * SHARE, -1]
)
def test_what_is_no_number_is_found_wherever_it_is(
    place: int, value: float, programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one share that is not whole, with a place of one row."""
    monkeypatch.setattr(hopper, "PLACES", programs)
    k = v = jnp.ones((1, 3 * SHARE // 64 + 97, 1, 64), HALF)
    assert k.size % SHARE and k.size // ROW % (PLACE // ROW) == 1
    place %= k.size
    if place % 2 == (programs == 2):
        k = set_at(k, place, value)
    else:
        v = set_at(v, place, value)
    found, shares, *_ = counted(k, v)
    assert found == 1 and shares == 4 + min(programs, 4)


@pytest.mark.parametrize("dtype", [HALF, jnp.float16])
def test_numbers_are_found_to_be_numbers_however_large(dtype: Any) -> None:
    largest = jnp.full((2, 150, 3, 128), jnp.finfo(dtype).max, dtype)
    assert counted(largest, -largest)[0] == 0


def test_more_that_is_no_number_counts_more() -> None:
    x = jnp.full((1, 160, 1, 128), NAN, HALF)
    assert counted(x, x)[0] > 1


@pytest.mark.parametrize("found", [0, 1])
def test_the_second_launch_writes_all_or_nothing(found: int) -> None:
    block = with_option("causal", 200, 300, dim=128, dtype=HALF)
    given, partial = operands.of(block), empty(block)
    table, first = hopper._table(given, block), Partial(partial.out + 5, partial.lse * 0 + 7)
    counts = COUNTS.at[hopper.FOUND_AT.value].set(found)
    got, counts = hopper._launched(given, block, first, table, counts, again=True)
    same(got, computed(block, partial, BESIDE[:2]) if found else first)
    assert counts.tolist()[:3] == [found, 0, 0]


@pytest.mark.parametrize("bad", [None, "key", "value", "one that a mask hides"])
@pytest.mark.parametrize("options", [{"causal": True}, {"logits_soft_cap": 20.0}], ids=str)
def test_gradients_are_those_of_keys_and_values_that_core_has_packed(options: dict[str, Any], bad: str | None) -> None:
    draw = np.random.default_rng(0)
    shapes = (2, 200, 4, 128), (2, 300, 2, 128), (2, 300, 2, 128)
    q, k, v = (jnp.asarray(draw.normal(size=shape), HALF) for shape in shapes)
    if bad == "key":
        k = k.at[0, 0, 0, 0].set(NAN)
    elif bad is not None:
        v = v.at[-1, 150 if bad == "value" else -1, -1, -1].set(-INFINITY)

    def loss(backend: str, *arrays: jax.Array) -> tuple[jax.Array, Any]:
        out, lse = ring_attention(*arrays, backend=backend, return_lse=True, **options)
        return (out.astype(jnp.float32) ** 2).sum() + lse.sum(), (out, lse)

    def computed_by(backend: str) -> tuple[set[str], list[jax.Array]]:
        with compiling_for(90), discovery.registered(dataclasses.replace(BACKEND, name="packing"), Packing()):
            program = jax.jit(jax.value_and_grad(functools.partial(loss, backend), (0, 1, 2), has_aux=True))
            names = {call.name for call, _ in launches(program.trace(q, k, v).jaxpr.jaxpr)}
            return names, jax.tree.leaves(program(q, k, v))

    (names, got), (others, want) = computed_by("triton"), computed_by("packing")
    assert names.issuperset(BESIDE) and "ringattn_looking" not in names
    assert "ringattn_packing" in others and not others.intersection(BESIDE[2:])
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x.astype(jnp.float32), y.astype(jnp.float32))
    assert np.isnan(got[2]).any() == (bad in ("key", "value") or (bad is not None and "causal" not in options))


def changed(transform: str | None) -> Any:
    """The call on arrays with a batch axis, as one who transforms it has it."""
    attend = functools.partial(ring_attention, backend="triton", sliding_window=(60, 0))
    if transform == "remat":
        return jax.checkpoint(attend)
    if transform == "vmap":
        return jax.vmap(lambda *arrays: attend(*(x[None] for x in arrays))[0])
    if transform == "shard_map":
        mesh = jax.make_mesh((1,), ("sp",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
        spec = jax.sharding.PartitionSpec(None, "sp")
        return jax.shard_map(functools.partial(attend, axis_name="sp"), mesh=mesh, in_specs=spec, out_specs=spec)
    return attend


@pytest.mark.parametrize("transform", ["remat", "vmap", "shard_map"])
def test_what_is_found_goes_through_transformations(transform: str) -> None:
    draw = np.random.default_rng(0)
    q, k, v = (jnp.asarray(draw.normal(size=(2, length, 1, 128)), HALF) for length in (128, 140, 140))
    v = v.at[1, 77, 0, 5].set(NAN)
    names, results = [], []
    for attend in (changed(None), changed(transform)):

        def loss(*arrays: jax.Array, attend: Any = attend) -> jax.Array:
            return jnp.nan_to_num(attend(*arrays).astype(jnp.float32)).sum()

        with compiling_for(90):
            program = jax.jit(jax.grad(loss, (0, 1, 2)))
            names.append({call.name for call, _ in launches(program.trace(q, k, v).jaxpr.jaxpr)})
            results.append(program(q, k, v))
    # Of many examples keys and values are packed, and there is nothing to look at; XLA sums over their rows.
    many = transform == "vmap"
    assert names[0].issuperset(BESIDE) and names[1].issuperset(BESIDE[:2] if many else BESIDE)
    for got, want in zip(*results, strict=True):
        x, y = got.astype(jnp.float32), want.astype(jnp.float32)
        np.testing.assert_allclose(x, y, rtol=2**-7 if many else 0, atol=2**-12 if many else 0)
    assert np.isnan(results[0][0][1]).any() and not np.isnan(results[0][0][0]).any()
