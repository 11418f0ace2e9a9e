# SPDX-License-Identifier: Apache-2.0
"""Promises on an output in two parts: as the caller has it, and what rounding took."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ringattn_core.contract import rounding


@pytest.mark.parametrize("jitted", [False, True])
def test_both_parts_together_are_as_exact_as_sixteen_bits(jitted: bool):
    """XLA may take a conversion there and back for none, and then there would be no rest."""

    def parts(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return x.astype(jnp.bfloat16), rounding.rest(x)

    x = jnp.asarray(np.random.default_rng(0).normal(size=4096) * 10.0 ** np.arange(-8, 8).repeat(256), jnp.float32)
    out, rest = (jax.jit(parts) if jitted else parts)(x)
    assert out.dtype == rest.dtype == jnp.bfloat16
    np.testing.assert_allclose(rounding.whole(out, rest), x, rtol=2**-17)
    assert np.abs(rounding.whole(out, None) / x - 1).max() > 2**-9.1


def test_what_bfloat16_can_hold_has_no_rest():
    x = jnp.asarray([0.0, 1.0, -3.5, 2.0**100, 2.0**-100])
    assert not rounding.rest(x).any()
    assert np.isnan(rounding.rest(jnp.asarray([np.nan]))).all()


def test_the_bits_are_widened_where_xla_might_convert_there_and_back():
    x = jnp.ones(8)
    program = jax.make_jaxpr(lambda x: rounding.whole(x.astype(jnp.bfloat16), rounding.rest(x)))(x)
    conversions = [(e.invars[0].aval.dtype, e.params["new_dtype"]) for e in program.eqns if "new_dtype" in e.params]
    back = [pair for pair in conversions if pair == (jnp.bfloat16, jnp.float32)]
    assert len(back) == 1, "of the rest, which nobody needs exactly"
