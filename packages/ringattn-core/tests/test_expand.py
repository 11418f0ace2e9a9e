# SPDX-License-Identifier: Apache-2.0
"""With `expand`, what travels is not keys and values: results and gradients are those of expanding first."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from ringattn_core import remat_policy, ring_attention
from ringattn_core.errors import InputError
from ringattn_testing.rings import close, graded, in_order_of, mesh_of, sent

B, T, N, K, H, LATENT, ROPE = 2, 48, 4, 4, 8, 6, 2
KEYS = jax.random.split(jax.random.key(0), 5)
QUERY = jax.random.normal(KEYS[0], (B, T, N, H))
X = {"latent": jax.random.normal(KEYS[2], (B, T, LATENT)), "rope": jax.random.normal(KEYS[3], (B, T, ROPE))}
PARAMS = {"key": jax.random.normal(KEYS[4], (LATENT, K, H - ROPE)), "value": jax.random.normal(KEYS[3], (LATENT, K, H))}


def mla(x: Any, params: Any) -> tuple[jax.Array, jax.Array]:
    """Multi-head latent attention: keys and values of all heads come from one latent vector of each token."""
    key, value = (jnp.einsum("bsc,ckh->bskh", x["latent"], params[name]) for name in ("key", "value"))
    rope = jnp.broadcast_to(x["rope"][:, :, None], (*key.shape[:3], x["rope"].shape[-1]))
    return jnp.concatenate([key, rope], -1), value


def agrees(attend: Any, layout: str = "contiguous", ranks: int = 1, **options: Any) -> None:
    """Whether `attend(query, x, params)` and its gradients are those of `mla` before attention on one device."""

    def natural(query: Any, x: Any, params: Any) -> Any:
        return in_order_of(layout, ranks, lambda query, x: attend(query, x, params))(query, x)

    def expanded_first(query: Any, x: Any, params: Any) -> Any:
        return ring_attention(query, *mla(x, params), causal=True, **options)

    close(*(graded(each, QUERY, X, PARAMS) for each in (natural, expanded_first)), 5e-5, 1e-5)


@pytest.mark.parametrize(
    ("ranks", "layout", "kind", "options"),
    [
        (1, "contiguous", AxisType.Auto, {}),
        (3, "zigzag", AxisType.Auto, {}),
        (4, "contiguous", AxisType.Explicit, {"sliding_window": (7, 0)}),
        (4, "contiguous", AxisType.Auto, {"balance": "zigzag"}),
        (2, "striped", AxisType.Explicit, {"strategy": "all_gather"}),
        (4, "contiguous", AxisType.Auto, {"strategy": "ulysses"}),
        (8, "zigzag", AxisType.Explicit, {}),
    ],
)
def test_results_and_gradients_are_those_of_expanding_first(
    ranks: int, layout: str, kind: AxisType, options: dict[str, Any]
) -> None:
    named: dict[str, Any] = {"mesh": mesh_of(kind, sp=ranks), "axis_name": "sp", "layout": layout, **options}

    def attend(query: Any, x: Any, params: Any) -> Any:
        return ring_attention(query, x, causal=True, expand=mla, expand_params=params, **named)

    agrees(attend, layout, ranks, sliding_window=options.get("sliding_window"))


def test_heads_are_split_and_a_ring_of_two_axes_is_checkpointed_in_a_shard_map() -> None:
    mesh = mesh_of(tp=2, outer=2, inner=2)
    ring, of_params = P(None, ("outer", "inner")), P(None, "tp")

    def local(query: Any, x: Any, params: Any) -> Any:
        return ring_attention(
            query, x, causal=True, axis_name=("outer", "inner"), head_axis_name="tp", expand=mla, expand_params=params
        )

    split = P(None, ("outer", "inner"), "tp")
    whole = jax.shard_map(local, mesh=mesh, in_specs=(split, ring, of_params), out_specs=split)
    agrees(jax.checkpoint(whole, policy=remat_policy()))


def test_lengths_that_the_ring_does_not_divide_are_padded() -> None:
    options: dict[str, Any] = {"mesh": mesh_of(sp=4), "axis_name": "sp", "causal": True}
    query, x = jax.tree.map(lambda a: a[:, :46], (QUERY, X))
    got = jax.jit(lambda *a: ring_attention(*a, expand=mla, expand_params=PARAMS, **options))(query, x)
    close(got, ring_attention(query, *mla(x, PARAMS), causal=True))


USES: dict[str, tuple[Any, Any, list[str]]] = {
    "multi-head latent attention": (X, mla, [f"f32[{B},12,{n}]" for n in (LATENT, ROPE)]),
    "keys that are the values": (QUERY, lambda x, _: (x, x), [f"f32[{B},12,{N},{H}]"]),
    "8 bits with scales": (
        {"bits": (QUERY * 40).astype(jnp.int8), "scale": jnp.abs(QUERY[..., :1])},
        lambda x, _: 2 * (x["bits"].astype(jnp.float32) * x["scale"],),
        [f"s8[{B},12,{N},{H}]", f"f32[{B},12,{N},1]"],
    ),
}


@pytest.mark.parametrize("name", USES)
def test_only_the_arrays_in_place_of_keys_and_values_travel(name: str) -> None:
    x, expand, arrays = USES[name]
    params, mesh = PARAMS if expand is mla else None, mesh_of(sp=4)
    split = NamedSharding(mesh, P(None, "sp"))
    placed = jax.device_put((QUERY, x), split)

    def attend(query: Any, x: Any) -> Any:
        options: dict[str, Any] = {"causal": True, "layout": "zigzag", "mesh": mesh, "axis_name": "sp"}
        return ring_attention(query, x, expand=expand, expand_params=params, **options)

    assert sent(attend, *placed) == sorted(3 * arrays)
    gradients = jax.grad(lambda *a: jnp.sin(attend(*a)).sum(), (0, 1), allow_int=True)
    floats = [array for array in arrays if array.startswith("f32")]
    assert sent(gradients, *placed) == sorted(6 * arrays + 3 * floats)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "one result": ({"expand": lambda x, p: x["latent"]}, r"expand: returned \(2, 48, 6\) for B, S = "),
    "a function of one argument": ({"expand": lambda x: mla(x, PARAMS)}, "expand: cannot be called: TypeError: "),
    "other tokens": (
        {"expand": lambda x, p: tuple(a[:, 1:] for a in mla(x, PARAMS))}, r"expand: returned \(\(2, 47, 4, 8\), "
    ),
    "an array of all tokens": (
        {"expand": lambda x, p: tuple(a + np.ones((B, T, 1, 1), np.float32) for a in mla(x, p))},
        r"expand: depends on the number of rows or tokens: it fits B, S = \(2, 48\), "
        r"but for \(4, 96\) it raises TypeError: "
    ),
    "a length of its own": (
        {"expand": lambda x, p: tuple(a[:, :T] for a in mla(x, p))},
        r"for \(4, 96\) it returned \(\(4, 48, 4, 8\), \(4, 48, 4, 8\)\)\. .*pass what differs by token in x"
    ),
    "a table of all tokens": (
        {"expand": lambda x, p: tuple(a + np.ones((1, T, 1, 1), np.float32)[:, : a.shape[1]] for a in mla(x, p))},
        r"for \(4, 96\) it raises TypeError: "
    ),
    "another dtype": (
        {"expand": lambda x, p: tuple(a.astype(jnp.bfloat16) for a in mla(x, PARAMS))},
        "expand: gives a key that has dtype bfloat16 but query has float32. Cast"
    ),
    "another head size": (
        {"expand": lambda x, p: tuple(a[..., 1:] for a in mla(x, PARAMS))},
        r"expand: gives a key that has shape \(2, 48, 4, 7\)"
    ),
    "a value too": ({"expand": mla, "value": QUERY}, "value: is given beside expand, which computes it"),
    "parameters alone": ({"value": QUERY}, "expand_params: is given without expand. Pass expand too"),
    "an array of one axis": ({"expand": mla, "key": X | {"z": jnp.ones(3)}}, "key: has .*needs the same B and S first"),
    "arrays of unequal lengths": (
        {"expand": mla, "key": X | {"z": jnp.ones((2, 3))}},
        "which differ in rows or tokens",
    ),
    "split heads": (
        {"expand": mla, "mesh": mesh_of(sp=2, tp=2), "axis_name": "sp"}, "expand: gives all heads, but the mesh axes"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    options, told = REFUSED[name]
    with pytest.raises(InputError, match=told):
        ring_attention(QUERY, **{"key": X, "expand_params": PARAMS, **options})


def test_a_traced_array_that_is_no_argument_is_refused() -> None:
    def attend(params: Any) -> Any:
        return ring_attention(QUERY, X, expand=lambda x, _: mla(x, params)).sum()

    with pytest.raises(InputError, match=r"reads a traced array of shape \(.*Pass it in"):
        jax.grad(attend)(PARAMS)
