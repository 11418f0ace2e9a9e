# SPDX-License-Identifier: Apache-2.0
"""What the TPU backend cannot do is refused in a sentence that names the reason and the remedy."""

import jax.numpy as jnp
import pytest
from ringattn_core.errors import InputError, UnsupportedFeatureError
from ringattn_tpu import ring_attention


def of(dtype=jnp.float32, length=8, head_dim=8):
    return jnp.ones((1, length, 1, head_dim), dtype)


def test_float16_is_refused_with_the_reason():
    x = of(jnp.float16)
    with pytest.raises(UnsupportedFeatureError, match=r"FLOAT16 \(not declared: .*has no float16; use bfloat16\)"):
        ring_attention(x, x, x)


@pytest.mark.parametrize("queries, values", [(257, 257), (64, 264)])
def test_heads_that_no_kernel_holds_are_refused(queries, values):
    q, v = of(head_dim=queries), of(head_dim=values)
    with pytest.raises(UnsupportedFeatureError, match=rf"heads of size {values} \(the largest is 256\)"):
        ring_attention(q, q, v)


def test_tiles_too_short_for_the_list_of_steps_are_refused_with_the_limit():
    x = of(jnp.bfloat16, length=128 * 400)
    with pytest.raises(InputError, match=r"tiles of 128 and 128 make more than 131072 steps"):
        ring_attention(x, x, x, fwd_params={"q_blocksize": 128, "kv_blocksize": 128})
