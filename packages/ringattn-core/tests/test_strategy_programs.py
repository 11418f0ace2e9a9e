# SPDX-License-Identifier: Apache-2.0
"""What a strategy sends, keeps and refuses, and that it works on every mesh and under every transformation."""

import functools
import re
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ringattn_core import Backend, Feature, from_flash, ring_attention
from ringattn_core.backends.discovery import registered
from ringattn_core.errors import InputError, UnsupportedFeatureError
from ringattn_core.tuning import choice
from ringattn_core.tuning.problem import of_call
from ringattn_testing.rings import close, differentiated, graded, mesh_of, query_key_value
from ringattn_testing.traced_calls import forget_traced_calls

OTHERS = ("all_gather", "ulysses")
COLLECTIVE = re.compile(r" (all-gather|reduce-scatter|all-to-all|collective-permute|all-reduce)(?:-start)?\(")


def arrays(length: int = 16, heads: tuple[int, int] = (8, 2)) -> list[jax.Array]:
    return query_key_value(2, length, *heads)


def collectives(f: Any, mesh: jax.sharding.Mesh, *x: Any) -> dict[str, int]:
    """How many collectives of each kind the compiled program has, with the tokens split over all axes of the mesh."""
    spec = NamedSharding(mesh, P(None, mesh.axis_names))
    text = jax.jit(f, in_shardings=spec, out_shardings=spec).lower(*x).compile().as_text()
    return dict(Counter(COLLECTIVE.findall(text)))


SENT: list[tuple[str, dict[str, int], dict[str, int], dict[str, int]]] = [
    # strategy, sizes of the mesh axes, forward pass, forward and backward pass
    ("all_gather", {"sp": 4}, {"all-gather": 1}, {"all-gather": 2, "reduce-scatter": 1}),
    ("ulysses", {"sp": 4}, {"all-to-all": 3}, {"all-to-all": 6}),
    (
        "ulysses",
        {"outer": 2, "inner": 2},
        {"all-to-all": 3, "collective-permute": 1},
        {"all-to-all": 6, "collective-permute": 3},
    ),
]


SHARED = [
    # Strategy, sizes of the mesh axes, and the shape of a bias. Its gradient is a sum over several ranks.
    ("ring", {"sp": 2}, (1, 8, 1, 16)),
    ("ring", {"dp": 2, "sp": 2}, (1, 8, 16, 16)),
    ("ring", {"tp": 2, "sp": 2}, (2, 1, 16, 16)),
    ("ulysses", {"sp": 2}, (2, 1, 16, 16)),
    ("ulysses", {"dp": 2, "sp": 2}, (1, 8, 16, 16)),
]


@pytest.mark.parametrize(("strategy", "sizes", "shape"), SHARED, ids=str)
def test_gradients_in_bfloat16_are_added_over_ranks_in_float32(
    strategy: str, sizes: dict[str, int], shape: tuple[int, ...]
):
    options: Any = {"mesh": mesh_of(**sizes), "axis_name": "sp", "strategy": strategy}

    def loss(x: Any, bias: Any, slopes: Any, sinks: Any) -> Any:
        return ring_attention(*x, sinks, bias, alibi_slopes=slopes, **options).astype(jnp.float32).sum()

    ones = [jnp.ones(size, jnp.bfloat16) for size in (shape, (8,), (8,))]
    operands = [x.astype(jnp.bfloat16) for x in arrays()]
    program = str(jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3)))(operands, *ones))
    added = re.findall(r":(\w+)\[[^]]*\] = (?:psum|reduce_scatter)\w*\[", program)
    assert set(added) == {"f32"}


@pytest.mark.parametrize("check_vma", [False, True])
def test_a_bias_may_be_a_constant_of_every_rank(check_vma: bool):
    """JAX then tracks that its rows do not vary over the ring, and their gathered gradient does."""
    x, rows = arrays(heads=(8, 8)), jnp.linspace(-1.0, 1.0, 4 * 16).reshape(1, 1, 4, 16)

    def loss(rows: Any, *x: Any) -> Any:
        return (ring_attention(*x, bias=rows, axis_name="sp", strategy="ulysses") ** 2).sum()

    def of_rank(*x: Any) -> Any:
        rank_loss, gradient = jax.value_and_grad(loss)(rows, *x)
        return jax.lax.psum(rank_loss, "sp"), gradient if check_vma else jax.lax.psum(gradient, "sp")

    spec = P(None, "sp")
    over = jax.shard_map(of_rank, mesh=mesh_of(sp=4), in_specs=spec, out_specs=P(), check_vma=check_vma)

    def alone(rows: Any) -> Any:
        return (ring_attention(*x, bias=jnp.tile(rows, (1, 1, 4, 1))) ** 2).sum()

    close(jax.jit(over)(*x), jax.value_and_grad(alone)(rows), 5e-5, 1e-5)


@pytest.mark.parametrize(("strategy", "sizes", "forward", "both"), SENT, ids=str)
def test_the_compiled_program_has_only_the_collectives_of_the_strategy(
    strategy: str, sizes: dict[str, int], forward: dict[str, int], both: dict[str, int]
):
    mesh = mesh_of(**sizes)

    def attend(*x: Any) -> Any:
        return ring_attention(*x, causal=True, mesh=mesh, axis_name=tuple(sizes), layout="zigzag", strategy=strategy)

    gradient = jax.grad(lambda *x: (attend(*x) ** 2).sum(), (0, 1, 2))
    assert collectives(attend, mesh, *arrays()) == forward
    assert collectives(gradient, mesh, *arrays()) == both


def test_the_backward_pass_keeps_no_array_that_was_gathered():
    def kept(strategy: str) -> int:
        options: dict[str, Any] = dict(mesh=mesh_of(sp=4), axis_name="sp", strategy=strategy)
        pull = jax.eval_shape(lambda *x: jax.vjp(lambda *x: ring_attention(*x, **options), *x)[1], *arrays())
        return sum(x.size for x in jax.tree.leaves(pull))

    assert kept("all_gather") == kept("ring")


@pytest.mark.parametrize("heads", [(8, 1), (8, 4)])
def test_gradients_of_key_heads_that_ranks_share_are_rounded_once(heads: tuple[int, int]):
    """So the error of a bfloat16 ring of 8 is that of one device."""
    x = [a.astype(jnp.bfloat16) for a in arrays(64, heads)]

    def gradients(*x: Any, **options: Any) -> Any:
        return jax.jit(jax.grad(lambda *x: (ring_attention(*x, **options).astype(jnp.float32) ** 2).sum(), (1, 2)))(*x)

    wanted = gradients(*(a.astype(jnp.float32) for a in x))
    over: dict[str, Any] = dict(mesh=mesh_of(sp=8), axis_name="sp", strategy="ulysses")
    for one, ring, right in zip(gradients(*x), gradients(*x, **over), wanted, strict=True):
        error, least = (jnp.sqrt(jnp.mean((a.astype(jnp.float32) - right) ** 2)) for a in (ring, one))
        assert error <= 1.1 * least


@pytest.mark.parametrize("strategy", OTHERS)
def test_a_call_on_global_arrays_may_be_in_a_shard_map_that_tracks_what_varies(strategy: str):
    """Ulysses takes this rank's share of the sinks, whose gradient needs the number of the rank again."""
    x, call = [*arrays(), jnp.linspace(-1.0, 1.0, 8)], functools.partial(ring_attention, causal=True)
    named = {"axis_name": ("a", "b"), "batch_axis_name": (), "head_axis_name": (), "strategy": strategy}
    stage = differentiated(functools.partial(call, **named))
    wanted = graded(call, *x)
    with jax.set_mesh(mesh_of(stage=2, a=2, b=2)):
        around = jax.shard_map(stage, in_specs=P(), out_specs=P(), axis_names={"stage"}, check_vma=True)
        close(jax.jit(around)(*x), wanted, 5e-5, 1e-5)


@pytest.mark.parametrize("strategy", ("ring", *OTHERS))
def test_a_call_may_be_vmapped_before_and_after_it_is_differentiated(strategy: str):
    x = [jnp.stack([a, 2 * a]) for a in (*arrays(), jnp.linspace(-1.0, 1.0, 8))]

    def both(**options: Any) -> Any:
        call = functools.partial(ring_attention, causal=True, **options)
        return jax.jit(jax.vmap(differentiated(call)))(*x), graded(jax.vmap(call), *x)

    close(both(mesh=mesh_of(sp=2), axis_name="sp", strategy=strategy), both(), 5e-5, 1e-5)


def attend(heads: tuple[int, int] = (8, 2), over: Any = "sp", **options: Any) -> Any:
    mesh = mesh_of(**({"sp": 4} if over == "sp" else {"a": 4, "b": 2}))
    return jax.eval_shape(lambda *x: ring_attention(*x, mesh=mesh, axis_name=over, **options), *arrays(16, heads))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(strategy="ulyses"), r"strategy: got 'ulyses' \(did you mean 'ulysses'\?\)"),
        (dict(strategy="ulysses", heads=(6, 2)), "6 query heads do not divide by 4 ranks"),
    ],
)
def test_what_a_strategy_cannot_do_is_refused(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match=message):
        attend(**options)


def test_a_backend_that_drives_the_ring_itself_has_no_other_strategy():
    own = Backend("own", 1, ("cpu",), {Feature.FLOAT32, Feature.GROUPED_HEADS}, ring="a:b")
    refused = pytest.raises(InputError, match="'ulysses' cannot run this call: backend 'own' drives its own ring")
    with registered(own, lambda query, key, value, **_: query), refused:
        attend(strategy="ulysses", backend="own")


def flash(*features: Feature) -> Any:
    """A backend of two functions of fused attention, which compute nothing here."""
    declared = (Feature.FLOAT32, Feature.CAUSAL, Feature.GROUPED_HEADS, Feature.STRIPED, *features)
    kernel = from_flash(lambda q, k, v, **_: (q, q[..., 0].swapaxes(1, 2)), lambda q, k, v, *_, **__: (q, k, v))
    return registered(Backend("flash", 1, ("cpu",), frozenset(declared), kernel="a:b"), kernel)


@pytest.mark.parametrize(
    "options", [dict(strategy="all_gather"), dict(strategy="ulysses", layout="striped", over=("a", "b"))], ids=str
)
def test_kernels_with_static_masks_refuse_blocks_that_need_another_mask(options: dict[str, Any]):
    with flash(Feature.CROSS_LENGTHS):
        with pytest.raises(InputError, match="the kernel of backend 'flash' does not have the masks"):
            attend(causal=True, backend="flash", **options)
        attend(causal=True, backend="flash", **options | dict(strategy="ulysses", over="sp"))


def test_gathered_keys_need_a_backend_that_takes_more_keys_than_queries():
    with flash(), pytest.raises(UnsupportedFeatureError, match="'flash' does not support CROSS_LENGTHS"):
        attend(strategy="all_gather", backend="flash")


def test_kernels_are_tuned_for_the_heads_and_tokens_that_ulysses_gives_them(monkeypatch: pytest.MonkeyPatch):
    seen: list[tuple[int, ...]] = []

    def spy(registration: Any, call: Any, ranks: int) -> Any:
        problem = of_call(registration, call, ranks)
        seen.append((problem.q_length, problem.kv_length, problem.heads, problem.kv_heads, ranks))
        return problem

    monkeypatch.setattr(choice, "of_call", spy)
    monkeypatch.setattr(choice, "tunable", lambda registration: True)
    forget_traced_calls()
    attend(strategy="ulysses")
    attend(strategy="ulysses", over=("a", "b"))
    # Before the exchange, shards have 4 and 2 tokens of 8 query heads and 2 key heads, on 4 and 8 ranks.
    assert set(seen) == {(16, 16, 2, 1, 1), (4, 4, 4, 1, 4)}
