# SPDX-License-Identifier: Apache-2.0
"""`keras.src.backend.nn.dot_product_attention` of Keras 3 on JAX, over a ring. This module does not import Keras."""

from typing import Any, Final

import jax
import jax.numpy as jnp

from .jax_nn import dot_product_attention as jax_attention
from .options import as_array, errors_in_terms_of, refuse

OF_KERAS: Final = {"logits_soft_cap": "attn_logits_soft_cap"}


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    scale: float | None = None,
    is_causal: bool = False,
    flash_attention: bool | None = None,
    attn_logits_soft_cap: float | None = None,
    **ring: Any,
) -> jax.Array:
    """Computes what Keras' function computes, with its names, order and defaults, and takes options for the ring.

    Set the ring's axis with `functools.partial`. Query, key, value and bias are promoted to one dtype, as in Keras.
    `flash_attention=True` asks for a kernel of Keras and is refused; `backend` names a backend of ringattn.
    """
    refuse({"flash_attention": flash_attention}, "Leave it out; `backend` names a kernel of the ring")
    arrays = [as_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))]
    dtype = jnp.result_type(*arrays)
    q, k, v = (x.astype(dtype) for x in arrays)
    added = None if bias is None else as_array("bias", bias).astype(dtype)
    if attn_logits_soft_cap is not None:
        ring = ring | {"logits_soft_cap": attn_logits_soft_cap}
    with errors_in_terms_of(OF_KERAS):
        return jax_attention(q, k, v, added, mask, scale=scale, is_causal=is_causal, **ring)
