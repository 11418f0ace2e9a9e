# SPDX-License-Identifier: Apache-2.0
"""`ring_loop`: a body of the caller's own sees the shards of all ranks, and what it sends home arrives there."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from ringattn_core import from_layout, ring_loop, to_layout
from ringattn_core.errors import DerivativeError, InputError, MeshError
from ringattn_testing.rings import RINGS, close, drawn, mesh_of, sent

B, T = 2, 48
X, Y = drawn((B, T, 3), (B, T, 3))


def causal_sums(own: Any, theirs: Any, carry: Any) -> Any:
    """For each token, the sums of the earlier tokens, and how often a token was seen."""
    seen = (theirs.index[None] <= own.index[:, None]).astype(jnp.float32)
    sums = jnp.einsum("ts,bsc->btc", seen, theirs.arrays["y"]) * own.arrays["x"]
    return sums if carry is None else carry + sums


def causal_sums_and_home(own: Any, theirs: Any, carry: Any) -> Any:
    """Also sends each token the sum of the later ones, and its own index once from every rank."""
    seen = (theirs.index[None] <= own.index[:, None]).astype(jnp.float32)
    home = {"later": jnp.einsum("ts,btc->bsc", seen, own.arrays["x"])}
    return causal_sums(own, theirs, carry), home | {"index": jnp.tile(theirs.index, (B, 1))}


EARLIER = np.cumsum(np.asarray(Y, np.float64), 1) * np.asarray(X)
LATER = np.cumsum(np.asarray(X, np.float64)[:, ::-1], 1)[:, ::-1]


@pytest.mark.parametrize(("ranks", "layout", "kind"), RINGS)
def test_a_body_sees_every_shard_once_and_sums_go_home(ranks: int, layout: str, kind: AxisType) -> None:
    mesh = mesh_of(kind, sp=ranks)
    x, y = (to_layout(a, layout, ranks) for a in (X, Y))
    options: dict[str, Any] = {"mesh": mesh, "axis_name": "sp", "layout": layout}
    close(from_layout(ring_loop(causal_sums, {"x": x}, {"y": y}, **options), layout, ranks), EARLIER, 1e-5)
    carry, home = ring_loop(causal_sums_and_home, {"x": x}, {"y": y}, send_home=True, **options)
    carry, home = jax.tree.map(lambda a: from_layout(a, layout, ranks), (carry, home))
    close((carry, home["later"]), (EARLIER, LATER), 1e-5)
    assert np.array_equal(home["index"], np.tile(ranks * np.arange(T), (B, 1)))


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("sizes", [{"a": 2, "b": 4}, {"data": 2, "a": 2, "b": 2}])
def test_a_ring_over_two_axes_in_ones_own_shard_map(sizes: dict[str, int], tracked: bool) -> None:
    spec = P("data" if "data" in sizes else None, ("a", "b"))

    def local(x: Any, y: Any) -> Any:
        ring: dict[str, Any] = {"axis_name": ("a", "b"), "send_home": True}
        body = causal_sums_and_home if "data" not in sizes else lambda *x: (causal_sums(*x), x[0].arrays["x"])
        return ring_loop(body, {"x": x}, {"y": y}, **ring)

    run = jax.shard_map(local, mesh=mesh_of(**sizes), in_specs=spec, out_specs=spec, check_vma=tracked)
    carry, home = jax.jit(run)(X, Y)
    close(carry, EARLIER, 1e-5)
    if "data" not in sizes:
        close(home["later"], LATER, 1e-5)


def test_a_long_ring_is_a_scan_and_batch_axes_stay_split() -> None:
    """Ten ranks are played by `vmap`; batch rows stay split on an explicit mesh."""
    x, y = (jnp.moveaxis(a[:, :40].reshape(B, 10, 4, 3), 1, 0) for a in (X, Y))
    ring: dict[str, Any] = {"axis_name": "sp", "send_home": True}
    played = jax.vmap(lambda x, y: ring_loop(causal_sums_and_home, {"x": x}, {"y": y}, **ring), axis_name="sp")
    carry, home = jax.jit(played)(x, y)
    later = np.cumsum(np.asarray(X, np.float64)[:, 39::-1], 1)[:, ::-1]
    wanted = [np.moveaxis(a[:, :40].reshape(B, 10, 4, 3), 1, 0) for a in (EARLIER, later)]
    close([carry, home["later"]], wanted, 1e-5)
    mesh = mesh_of(AxisType.Explicit, data=2, sp=4)
    split = [jax.device_put(a, jax.NamedSharding(mesh, P("data", "sp"))) for a in (X, Y)]
    out = jax.jit(lambda x, y: ring_loop(causal_sums, {"x": x}, {"y": y}, axis_name="sp"))(*split)
    assert tuple(out.sharding.spec)[:2] == ("data", "sp")
    close(out, EARLIER, 1e-5)


def test_a_carry_may_hold_bools_and_integers() -> None:
    def body(own: Any, theirs: Any, carry: Any) -> Any:
        after = jnp.tile((theirs.index[None] > own.index[:, None]).sum(1), (B, 1))
        some, count = (after > 0, after) if carry is None else (carry[0] | (after > 0), carry[1] + after)
        return (some, count), {"ones": jnp.ones(theirs.arrays["y"].shape[:2], jnp.int32)}

    mesh, length = mesh_of(sp=4), X.shape[1]
    (some, count), home = ring_loop(body, {"x": X}, {"y": Y}, send_home=True, mesh=mesh, axis_name="sp")
    np.testing.assert_array_equal(count, np.tile(np.arange(length)[::-1], (B, 1)))
    np.testing.assert_array_equal(some, np.asarray(count) > 0)
    np.testing.assert_array_equal(home["ones"], np.full((B, length), 4))


def test_only_what_travels_is_sent_each_shard_once_a_hop() -> None:
    def run(x: Any, y: Any) -> Any:
        return ring_loop(causal_sums, {"x": x}, {"y": y}, mesh=mesh_of(sp=4), axis_name="sp")

    assert sent(run, X, Y[..., :2].repeat(2, 2)[..., :3]) == ["f32[2,12,3]"] * 3


def test_a_derivative_is_refused() -> None:
    with pytest.raises(DerivativeError, match="custom_vjp"):
        jax.grad(lambda x: ring_loop(causal_sums, {"x": x}, {"y": Y}).sum())(X)


@pytest.mark.parametrize(
    ("own", "travelling", "options", "says"),
    [
        ({"x": X}, {"y": Y[:, :45]}, {}, "y has 45"),
        ({"x": X, "w": X[:, :40]}, {"y": Y}, {}, "w: has shape"),
        ({"x": X[0, :, 0]}, {"y": Y}, {}, r"x: has shape \(48,\)"),
        ({"x": X}, {"y": Y > 0}, {}, "y: has dtype bool"),
        ({"x": X}, {"y": Y.astype(jnp.complex64)}, {}, "y: has dtype complex64"),
        ({"x": X}, {}, {}, "travelling: has no array"),
        ({"x": X}, {"y": Y}, {"axis_name": "tp"}, "tp"),
        ({"x": X}, {"y": Y}, {"layout": "zig"}, "layout"),
    ],
)
def test_what_is_wrong_is_named(own: Any, travelling: Any, options: Any, says: str) -> None:
    with pytest.raises((InputError, MeshError), match=says):
        ring_loop(causal_sums, own, travelling, **{"mesh": mesh_of(sp=4), "axis_name": "sp", **options})
