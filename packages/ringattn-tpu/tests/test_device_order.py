# SPDX-License-Identifier: Apache-2.0
"""On a TPU without wrap-around links a send overlaps with work only where the ring's device order lets it.

Compiled ahead of time for a slice that nobody needs to have: what is synchronous, and what runs behind what, is what
XLA decided. With two ways round both directions are busy all the time.
"""

import functools
import os
import re
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"
# Read when libtpu loads: several test processes may do so at once, and none asks the network what it runs on.
os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_LOG_DIR": "disabled"}

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ringattn_core import ring_attention, ring_mesh

pytest.importorskip("libtpu", reason="libtpu compiles for TPUs: pip install 'jax[tpu]'")

TOKENS = P(None, "sp")
LENGTH = 512
"""The tokens of a device. With 2048, XLA leaves the same permutes synchronous, and compiles for twice as long."""


def devices(topology: str) -> list[Any]:
    return list(topologies.get_topology_desc(platform="tpu", topology_name=topology).devices)


def scheduled(mesh: Mesh, attend: Any) -> str:
    """The program that XLA makes, its instructions in the order in which they run."""
    local = jax.shard_map(attend, mesh=mesh, in_specs=TOKENS, out_specs=TOKENS, check_vma=False)
    shape = jax.ShapeDtypeStruct((1, LENGTH * mesh.shape["sp"], 4, 128), jnp.bfloat16)
    text = jax.jit(local, in_shardings=NamedSharding(mesh, TOKENS)).lower(shape, shape).compile().as_text() or ""
    assert "is_scheduled=true" in text
    return text


def permutes(mesh: Mesh, attend: Any) -> tuple[int, int]:
    """How many of the program's permutes are synchronous, and how many have a start and a done."""
    text = scheduled(mesh, attend)
    return len(re.findall(r" collective-permute\(", text)), len(re.findall(r" collective-permute-start\(", text))


def products(q: jax.Array, kv: jax.Array) -> jax.Array:
    """As much of a ring as its sends are hidden by: each brings the operand of the products after the next ones."""
    ranks, out = jax.lax.axis_size("sp"), jnp.zeros_like(q)
    for _ in range(2):
        following = jax.lax.ppermute(kv, "sp", [(rank, (rank + 1) % ranks) for rank in range(ranks)])
        scores = jnp.tanh(jnp.einsum("btnh,bsnh->bnts", q, kv))
        out += jnp.einsum("bnts,bsnh->btnh", scores, kv)
        kv, out = jax.lax.optimization_barrier((following, out))
    return out + kv


def attention(q: jax.Array, kv: jax.Array) -> jax.Array:
    return ring_attention(q, kv, kv, axis_name="sp", causal=True, layout="zigzag", backend="xla")


@pytest.mark.parametrize("attend", [products, attention])
def test_on_a_plane_of_64_the_naive_order_is_synchronous_and_that_of_ring_mesh_is_not(attend: Any):
    everything = devices("v5e:8x8")
    naive, _ = permutes(Mesh(np.array(everything), ("sp",)), attend)
    assert naive > 0
    synchronous, started = permutes(ring_mesh(everything), attend)
    assert synchronous == 0 and started > 0


@pytest.mark.parametrize("topology, ranks", [("v5e:4x8", 32), ("v6e:8x8", 16), ("v5p:4x4x4", 64)])
def test_no_ring_of_a_mesh_is_synchronous(topology: str, ranks: int):
    everything = devices(topology)
    mesh = ring_mesh(everything, axis_sizes={"data": len(everything) // ranks, "sp": ranks})
    assert permutes(mesh, products) == (0, 2)


def test_two_devices_a_chip_are_visited_one_after_the_other():
    mesh = ring_mesh(devices("tpu7x:2x2x1"))
    chips = [tuple(device.coords) for device in mesh.devices]
    assert chips[::2] == chips[1::2] and len(set(chips)) == 4
    assert permutes(mesh, products) == (0, 2)


def test_a_straight_line_is_synchronous_and_a_folded_one_is_not():
    everything = devices("v5e:8x8")
    rows = [[device for device in everything if device.coords[1] == y] for y in range(8)]
    folded = np.array([ring_mesh(row).devices for row in rows])
    assert [device.coords[0] for device in rows[0]] == list(range(8))
    assert permutes(Mesh(np.array(rows), ("data", "sp")), products)[0] == 2
    assert permutes(Mesh(folded, ("data", "sp")), products) == (0, 2)


def test_in_a_ring_of_two_levels_a_send_between_groups_is_under_way_during_all_kernels_of_a_round():
    mesh = Mesh(np.array(devices("v5e:2x4")).reshape(2, 4), ("groups", "sp"))
    tokens = P(None, ("groups", "sp"))
    attend = functools.partial(ring_attention, axis_name=("groups", "sp"), backend="xla")
    ring = jax.shard_map(attend, mesh=mesh, in_specs=tokens, out_specs=tokens, check_vma=False)
    shape = jax.ShapeDtypeStruct((1, 2048 * 8, 4, 128), jnp.bfloat16)
    text = jax.jit(ring, in_shardings=NamedSharding(mesh, tokens)).lower(*[shape] * 3).compile().as_text() or ""
    assert "is_scheduled=true" in text
    steps = re.findall(
        r"%(\S+) = [^\n]*? (?:collective-permute-start\(.*source_target_pairs=\{\{(\d+),(\d+)\}"
        r"|collective-permute-done\(%(\S+)\)|while\()",
        text[text.index("\nENTRY") :],
    )
    (between,) = [name for name, sender, receiver, _ in steps if sender and int(sender) // 4 != int(receiver) // 4]
    start, done = ([step[column] for step in steps].index(between) for column in (0, 3))
    kernels = [number for number, (_, sender, _, ends) in enumerate(steps) if not sender and not ends]
    assert len(kernels) == 8 and start < kernels[0] and kernels[3] < done < kernels[4]
