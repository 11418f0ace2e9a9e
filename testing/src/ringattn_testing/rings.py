# SPDX-License-Identifier: Apache-2.0
"""Meshes, random operands, comparisons and the sends of compiled programs, which many tests need."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from ringattn_core import from_layout, ring_attention, to_layout

RINGS = [
    (1, "contiguous", AxisType.Auto),
    (2, "striped", AxisType.Auto),
    (3, "zigzag", AxisType.Explicit),
    (4, "contiguous", AxisType.Explicit),
    (4, "striped", AxisType.Explicit),
    (8, "zigzag", AxisType.Auto),
]
"""Every number of ranks and every layout, each layout on a mesh of either kind. All products would take minutes."""


def mesh_of(kind: AxisType = AxisType.Auto, **sizes: int) -> Mesh:
    """A mesh with these axes, all of this kind, over the first devices."""
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes), devices=devices)


def drawn(*shapes: tuple[int, ...]) -> list[jax.Array]:
    """Normal numbers of these shapes, in float32."""
    return [jax.random.normal(jax.random.key(number), shape, jnp.float32) for number, shape in enumerate(shapes)]


def query_key_value(batch: int, length: int, heads: int, key_heads: int, size: int = 8) -> list[jax.Array]:
    """Query, key and value of normal numbers."""
    return drawn(*((batch, length, count, size) for count in (heads, key_heads, key_heads)))


def differentiated(attend: Any) -> Any:
    """A function that returns the results of `attend`, and the gradients of the sum of their sines by all operands."""

    def both(*operands: Any) -> Any:
        def loss(*operands: Any) -> Any:
            results = attend(*operands)
            return sum(jnp.sin(x).sum() for x in jax.tree.leaves(results)), results

        (_, results), gradients = jax.value_and_grad(loss, tuple(range(len(operands))), has_aux=True)(*operands)
        return results, gradients

    return both


def graded(attend: Any, *operands: Any) -> Any:
    """The results of `attend` and those gradients, by one compiled program."""
    return jax.jit(differentiated(attend))(*operands)


@functools.partial(
    jax.jit,
    static_argnames=(
        "causal",
        "sliding_window",
        "logits_soft_cap",
        "dropout_prob",
        "mask_builder",
        "return_lse",
        "return_max_logits",
    ),
)
def masked(mask: Any, *operands: Any, **options: Any) -> Any:
    """Attention under a dense mask on one device, and its gradients: one program for all masks of a shape."""
    return differentiated(lambda *x: ring_attention(*x, attention_mask=mask, **options))(*operands)


def in_order_of(layout: str, ranks: int, attend: Any) -> Any:
    """`attend`, whose arrays are in the order of a layout, as a function of arrays in natural order."""

    def natural(*operands: Any) -> jax.Array:
        moved = jax.tree.map(lambda x: to_layout(x, layout, ranks), operands)
        return from_layout(attend(*moved), layout, ranks)

    return natural


def close(got: Any, wanted: Any, atol: float = 2e-5, rtol: float = 1e-7) -> None:
    """Asserts that two trees agree, leaf by leaf."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol, atol), got, wanted)


def sent(f: Any, *operands: Any) -> list[str]:
    """The type of each array that the compiled program permutes or gathers, such as `f32[2,12,8]`, sorted."""
    text = jax.jit(f).lower(*operands).compile().as_text() or ""
    return sorted(re.findall(r"= (\S+?)\{\S* (?:collective-permute|all-gather)(?:-start)?\(", text))


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    """The messages of the warnings in a log."""
    return [record.getMessage() for record in log.records if record.levelname == "WARNING"]
