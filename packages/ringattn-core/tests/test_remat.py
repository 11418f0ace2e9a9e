# SPDX-License-Identifier: Apache-2.0
"""A checkpointed layer keeps the output and the log-sum-exp of the ring, and does not run the ring again."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from ringattn_core import remat_policy, ring_attention
from ringattn_core.errors import InputError

RANKS = 4
MESH = Mesh(np.array(jax.devices()[:RANKS]), ("sp",))
X = jax.random.normal(jax.random.key(0), (1, 32, 16))
LAYERS = 0.2 * jax.random.normal(jax.random.key(1), (2, 4, 16, 2, 8))
SINKS = jnp.asarray([0.5, -1.0])


def layer(x: jax.Array, weights: jax.Array, **options: Any) -> tuple[jax.Array, None]:
    query, key, value = (jnp.einsum("btm,mnh->btnh", x, w) for w in weights[:3])
    out = ring_attention(query, key, value, SINKS, causal=True, axis_name="sp", **options)
    return x + jnp.einsum("btnh,mnh->btm", out, weights[3]), None


def gradients(how: Callable[[Any], Any], where: str, **options: Any) -> Any:
    """The gradient of two layers in a scan, traced."""

    def layers(x: jax.Array, weights: jax.Array) -> jax.Array:
        mesh = {"mesh": MESH} if where == "global arrays" else {}
        return jax.lax.scan(how(lambda x, w: layer(x, w, **mesh | options)), x, weights)[0]

    over = jax.shard_map(layers, mesh=MESH, in_specs=(P(None, "sp"), P()), out_specs=P(None, "sp"))
    attend = layers if where == "global arrays" else over
    return jax.jit(jax.grad(lambda x, w: (attend(x, w) ** 2).sum(), (0, 1))).trace(X, LAYERS)


def compiled(how: Callable[[Any], Any], where: str = "global arrays", **options: Any) -> Any:
    return gradients(how, where, **options).lower().compile()


def unchanged(f: Any) -> Any:
    return f


def kept(f: Any) -> Any:
    return jax.checkpoint(f, policy=remat_policy())


def offloaded(f: Any) -> Any:
    return jax.checkpoint(f, policy=remat_policy(True))


def sends(program: Any, kind: str = "collective-permute") -> int:
    return len(re.findall(rf" {kind}(?:-start)?\(", program.as_text()))


def assert_equal(got: Any, wanted: Any) -> None:
    for a, b in zip(got(X, LAYERS), wanted(X, LAYERS), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("where", ["global arrays", "own shard_map"])
def test_with_the_policy_a_ring_of_four_sends_nine_times_and_not_twelve(where: str) -> None:
    plain, again, once = (compiled(how, where) for how in (unchanged, jax.checkpoint, kept))
    assert (sends(plain), sends(again), sends(once)) == (9, 12, 9)
    assert_equal(once, plain)


def test_with_the_policy_all_keys_are_gathered_twice_and_not_three_times() -> None:
    options = {"strategy": "all_gather"}
    plain, again, once = (compiled(how, **options) for how in (unchanged, jax.checkpoint, kept))
    assert [sends(program, "all-gather") for program in (plain, again, once)] == [2, 3, 2]
    assert_equal(once, plain)


def test_with_the_policy_ulysses_exchanges_again_but_runs_no_forward_kernel_again() -> None:
    """Of query, of keys with values, and of the output, it keeps what the kernel gives, and not what it sends."""
    options = {"strategy": "ulysses", "mesh": Mesh(np.array(jax.devices()[:2]), ("sp",))}
    plain, again, once = (compiled(how, **options) for how in (unchanged, jax.checkpoint, kept))
    assert [sends(program, "all-to-all") for program in (plain, again, once)] == [6, 9, 9]
    products = [program.as_text().count(" dot(") for program in (plain, again, once)]
    assert products[0] < products[2] < products[1]  # projections are computed again
    assert_equal(once, plain)


def test_the_output_and_the_log_sum_exp_of_every_layer_are_offloaded_to_the_host() -> None:
    program = str(gradients(offloaded, "global arrays").jaxpr)
    of_the_scan = [line for line in program.splitlines() if line.rstrip().endswith("= scan[")]
    layers, (batch, tokens, _), (_, _, heads, size) = len(LAYERS), X.shape, LAYERS[0].shape
    out, lse = (RANKS * batch, tokens // RANKS, heads, size), (RANKS * batch, heads, tokens // RANKS)
    wanted = [f"f32<host>[{','.join(map(str, (layers, *shape)))}]" for shape in (out, lse)]
    assert [re.findall(r"f32<host>\[[\d,]+\]", line) for line in of_the_scan] == [wanted, []]
    again = compiled(offloaded)
    assert sends(again) == 9
    assert_equal(again, compiled(unchanged))


def test_a_place_to_offload_to_is_no_flag() -> None:
    with pytest.raises(InputError, match="offload: got 'host'"):
        remat_policy("host")
