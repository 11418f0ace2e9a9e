# SPDX-License-Identifier: Apache-2.0
"""A kernel that breaks the block protocol is told what it returned and what was asked for."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ringattn_core import Backend, Feature, Gradients, Partial, Support, discovery, ring_attention
from ringattn_core.errors import KernelError

EVERYTHING = Backend(name="odd", api=1, platforms=("cpu",), kernel="a:b", features=dict.fromkeys(Feature, Support.FULL))


class Odd:
    """Returns nothing but zeros, with some results replaced."""

    def __init__(self, **replaced: Any):
        self.replaced = replaced

    def forward(self, block: Any, partial: Partial) -> Any:
        result = Partial(partial.out * 0, partial.lse * 0)
        return self.replaced.get("forward", dataclasses.replace(result, **self.of(Partial)))

    def backward(self, block: Any, dout: Any, lse: Any, delta: Any, dq: Any) -> Any:
        result = Gradients(dq, jnp.zeros(block.k.shape), jnp.zeros(block.v.shape), jnp.zeros(block.bias.shape))
        return dataclasses.replace(result, **self.of(Gradients))

    def of(self, kind: type) -> dict[str, Any]:
        names = {field.name for field in dataclasses.fields(kind)}
        return {name: value for name, value in self.replaced.items() if name in names}


def differentiate(kernel: Odd) -> Any:
    q = jnp.ones((1, 4, 2, 8))
    with discovery.registered(EVERYTHING, kernel):
        return jax.grad(lambda bias: ring_attention(q, q, q, None, bias, backend="odd").sum())(jnp.ones((1, 2, 4, 4)))


@pytest.mark.parametrize(
    "replaced, message",
    [
        (dict(forward=(1, 2)), "Odd.forward returned tuple. Return a Partial"),
        (dict(lse=jnp.ones((1, 4, 2))), "Odd.forward returned lse = float32[1, 4, 2]. Return float32[1, 2, 4]"),
        (dict(out=jnp.ones((1, 4, 2, 8), jnp.bfloat16)), "Odd.forward returned out = bfloat16[1, 4, 2, 8]"),
        (dict(dbias=None), "Odd.backward returned dbias = None. Return float32[1, 2, 4, 4]"),
        (dict(dk=jnp.ones((1, 4, 1, 8))), "Odd.backward returned dk = float32[1, 4, 1, 8]. Return float32[1, 4, 2, 8]"),
    ],
)
def test_a_result_of_another_shape_is_refused(replaced: dict[str, Any], message: str):
    with pytest.raises(KernelError) as error:
        differentiate(Odd(**replaced))
    assert message in str(error.value)


def test_a_gradient_that_nobody_asked_for_is_dropped():
    assert (differentiate(Odd(dslopes=jnp.ones((1, 2)))) == 0).all()
