# SPDX-License-Identifier: Apache-2.0
"""Calls on global arrays give the results of one device on every kind of mesh: explicit, automatic, mixed, abstract."""

import contextlib
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ringattn_core import remat_policy, ring_attention
from ringattn_core.errors import MeshError
from ringattn_testing.rings import close, differentiated, graded, query_key_value

N, K = 4, 2
AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit
KINDS = {
    "automatic": (AUTO, AUTO, AUTO),
    "explicit": (EXPLICIT, EXPLICIT, EXPLICIT),
    "explicit batch": (EXPLICIT, AUTO, AUTO),
    "explicit ring": (AUTO, EXPLICIT, AUTO),
}

WAYS = [
    # How the call learns of the mesh, the kinds of its axes, and a length, which 2 ranks divide or not.
    *(("mesh", kind, 13) for kind in KINDS),
    ("mesh", "explicit", 16),
    *(("name in the context", kind, 13) for kind in ("automatic", "explicit", "explicit ring")),
    *((how, "automatic", 13) for how in ("mesh in its context", "abstract mesh", "typed arrays")),
    *((how, "explicit", 16) for how in ("mesh in its context", "abstract mesh", "typed arrays")),
]


def arrays(length: int = 16, heads: int = N, key_heads: int = K) -> list[jax.Array]:
    return query_key_value(2, length, heads, key_heads)


def mesh_of(kind: str = "automatic", **axes: int) -> jax.sharding.Mesh:
    axes = axes or dict(dp=2, sp=2, tp=2)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=KINDS[kind][: len(axes)])


def call(**options: Any) -> Any:
    """The call with these options; without options, on one device."""
    return functools.partial(ring_attention, causal=True, **options or {"axis_name": ()})


@functools.cache
def of_one_device(length: int) -> Any:
    """The output and the gradients of the call without options on arrays of this length."""
    return graded(call(), *arrays(length), jnp.linspace(-1.0, 1.0, N))


same = functools.partial(close, atol=5e-5, rtol=1e-5)


@pytest.fixture(autouse=True)
def no_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.mark.parametrize(("how", "kind", "length"), WAYS)
def test_results_and_gradients_are_those_of_one_device(how: str, kind: str, length: int) -> None:
    x, sinks, mesh = arrays(length), jnp.linspace(-1.0, 1.0, N), mesh_of(kind)
    wanted = of_one_device(length)
    options: dict[str, Any] = dict(axis_name="sp")
    if how.startswith("mesh") or how == "typed arrays":
        options["mesh"] = mesh
    if how == "abstract mesh":
        options["mesh"] = mesh.abstract_mesh
    if how == "typed arrays":
        x = [jax.device_put(a, NamedSharding(mesh, P("dp", "sp" if length % 2 == 0 else None, "tp"))) for a in x]
    with contextlib.nullcontext() if how in ("mesh", "typed arrays") else jax.set_mesh(mesh):
        same(graded(call(**options), *x, sinks), wanted)


@pytest.mark.parametrize(("kind", "given"), [("automatic", True), ("explicit", False), ("explicit ring", False)])
def test_without_jit_too(kind: str, given: bool) -> None:
    x, sinks, mesh = arrays(13), jnp.linspace(-1.0, 1.0, N), mesh_of(kind)
    with jax.set_mesh(mesh):
        attend = call(axis_name="sp", **(dict(mesh=mesh) if given else {}))
        same(differentiated(attend)(*x, sinks), of_one_device(13))


def test_an_abstract_mesh_without_jit_is_that_of_the_context() -> None:
    x, mesh = [jax.device_put(a, jax.devices()[3]) for a in arrays()], mesh_of()
    with jax.set_mesh(mesh):
        same(ring_attention(*x, mesh=mesh.abstract_mesh, axis_name="sp"), ring_attention(*arrays(), axis_name=()))
    with pytest.raises(MeshError, match=r"the mesh is abstract, and has no devices\. Call inside `jax.set_mesh`"):
        ring_attention(*x, mesh=mesh.abstract_mesh, axis_name="sp")


@pytest.mark.parametrize("jit", [True, False])
def test_arrays_that_are_split_over_explicit_axes_bring_their_mesh(jit: bool) -> None:
    mesh, wanted = mesh_of("explicit"), ring_attention(*arrays(), causal=True)
    x = [jax.device_put(a, NamedSharding(mesh, P("dp", "sp", "tp"))) for a in arrays()]

    def attend(**options: Any) -> Any:
        def call(*x: Any) -> Any:
            return ring_attention(*x, causal=True, **options)

        return (jax.jit(call) if jit else call)(*x)

    same(attend(axis_name="sp"), wanted)
    with pytest.raises(MeshError, match="axis_name is missing"):
        attend()


@pytest.mark.parametrize(
    ("kind", "length", "check_vma"),
    [("automatic", 13, True), ("automatic", 13, False), ("explicit", 16, True), ("explicit ring", 13, True)],
)
def test_inside_a_manual_axis_of_a_pipeline(kind: str, length: int, check_vma: bool) -> None:
    """A stage scans layers under a checkpoint. All layers attend to the same keys, which are constants of the scan."""
    x, sinks = arrays(length), jnp.linspace(-1.0, 1.0, N)
    mesh = mesh_of(kind, pp=2, sp=2, tp=2)

    def stage(q: Any, k: Any, v: Any, sinks: Any, axis_name: Any = "sp") -> Any:
        def layer(q: Any, _: Any) -> Any:
            return ring_attention(q, k, v, softmax_aux=sinks, causal=True, axis_name=axis_name), None

        return jax.lax.scan(jax.checkpoint(layer, policy=remat_policy()), q, None, length=2)[0]

    split = (P("pp"),) * 3
    stages = jax.shard_map(
        stage, mesh=mesh, in_specs=(*split, P()), out_specs=P("pp"), axis_names={"pp"}, check_vma=check_vma
    )

    wanted = graded(functools.partial(stage, axis_name=()), *x, sinks)
    with jax.set_mesh(mesh):
        # The results of a layer go into the next one, and are split over the explicit axes that divide them.
        spec = P("pp", "sp", "tp") if kind == "explicit" else P("pp")
        placed = [jax.device_put(array, spec) for array in x]
        same(graded(stages, *placed, sinks), wanted)


@pytest.mark.parametrize(("kind", "key_heads"), [("automatic", 6), ("explicit", 3)])
def test_key_heads_need_not_be_a_multiple_of_the_ranks_that_split_heads(kind: str, key_heads: int) -> None:
    x, sinks = arrays(16, 12, key_heads), jnp.linspace(-1.0, 1.0, 12)
    mesh = mesh_of(kind, sp=2, tp=4)
    with jax.set_mesh(mesh):
        same(graded(call(axis_name="sp"), *x, sinks), graded(call(), *x, sinks))


def every_option(length: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (2, length))), jnp.int32)
    return dict(
        bias=jnp.asarray(rng.normal(size=(1, N, length, length)), jnp.float32),
        attention_mask=jnp.asarray(rng.random((2, 1, length, length)) < 0.8),
        q_segment_ids=ids,
        q_positions=jnp.arange(length, dtype=jnp.int32) * 2,
        alibi_slopes=jnp.linspace(0.1, 0.5, N),
        softmax_aux=jnp.linspace(-1.0, 1.0, N),
    )


SETTINGS: dict[str, Any] = dict(sliding_window=9, dropout_prob=0.3, dropout_seed=5, logits_soft_cap=20.0)


@pytest.mark.parametrize(("kind", "length", "manual"), [("explicit", 16, True), ("explicit ring", 13, False)])
def test_every_option_works_on_explicit_axes_and_within_a_manual_axis(kind: str, manual: bool, length: int) -> None:
    x, more = arrays(length), every_option(length)
    floating = ("bias", "alibi_slopes", "softmax_aux")

    def attend(q: Any, k: Any, v: Any, more: Any, **named: Any) -> Any:
        return ring_attention(q, k, v, **more, **SETTINGS, **named, return_lse=True, return_max_logits=True)

    def stages(q: Any, k: Any, v: Any, more: Any) -> Any:
        def stage(*x: Any) -> Any:
            return attend(*x, axis_name="sp", batch_axis_name=(), head_axis_name="tp")

        return jax.shard_map(stage, in_specs=P(), out_specs=P(), axis_names={"pp"}, check_vma=True)(q, k, v, more)

    mesh = mesh_of(kind, pp=2, sp=2, tp=2) if manual else mesh_of(kind)
    floats = {name: more[name] for name in floating}
    wanted = graded(lambda x, floats: attend(*x, more | floats), x, floats)
    with jax.set_mesh(mesh):
        whole = stages if manual else lambda *x: attend(*x, axis_name="sp")
        same(graded(lambda x, floats: whole(*x, more | floats), x, floats), wanted)


def test_a_call_that_names_no_axis_of_the_mesh_that_is_set_warns() -> None:
    wanted = ring_attention(*arrays(), causal=True)
    with jax.set_mesh(mesh_of(dp=2, sp=4)):
        with pytest.warns(UserWarning, match="axes 'dp', 'sp', and the call names none .* Pass axis_name="):
            out = ring_attention(*arrays(), causal=True)
        same(out, wanted)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            ring_attention(*arrays(), causal=True, axis_name=())


@pytest.mark.parametrize("jit", [True, False])
def test_another_mesh_than_the_one_that_is_set_is_refused(jit: bool) -> None:
    def call(*x: Any) -> Any:
        return ring_attention(*x, mesh=mesh_of(dp=2, sp=4), axis_name="sp")

    message = r"has the axes dp=2 \(Auto\), sp=4 \(Auto\), but jax.set_mesh has set another .* x=8 \(Auto\)"
    with jax.set_mesh(mesh_of(x=8)), pytest.raises(MeshError, match=message):
        (jax.jit(call) if jit else call)(*arrays())


@pytest.mark.parametrize("kind", ["automatic", "explicit"])
def test_a_function_may_be_traced_around_a_query_that_is_not(kind: str) -> None:
    query, *kv = arrays()

    def over_ring(key: Any, value: Any) -> Any:
        ring = {"axis_name": "sp", "batch_axis_name": "dp", "head_axis_name": "tp"}
        return ring_attention(query, key, value, causal=True, **ring)

    out, gradients = graded(functools.partial(ring_attention, query, causal=True), *kv)
    twice = [jnp.stack([x, x]) for x in kv]
    with jax.set_mesh(mesh_of(kind)):
        same(differentiated(over_ring)(*kv)[1], gradients)
        same(jax.jit(over_ring)(*kv), out)
        same(jax.vmap(over_ring)(*twice), jnp.stack([out, out]))


def test_an_automatic_axis_is_not_named_where_the_ring_is_manual() -> None:
    mesh = jax.make_mesh((2, 2), ("sp", "tp"), axis_types=(AxisType.Auto,) * 2)
    split = P(None, "sp")

    def local(*x: jax.Array) -> jax.Array:
        return ring_attention(*x, axis_name="sp", head_axis_name="tp")

    attend = jax.shard_map(local, in_specs=(split,) * 3, out_specs=split, axis_names={"sp"})
    with jax.set_mesh(mesh), pytest.raises(MeshError, match=r"JAX splits arrays by itself over 'tp'\. Make"):
        jax.jit(attend)(*arrays()[:3])
