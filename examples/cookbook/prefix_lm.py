# SPDX-License-Identifier: Apache-2.0
"""A prefix language model, such as PaliGemma: image and prompt see one another, the answer is causal."""

import jax
import jax.numpy as jnp
import numpy as np
from llama import SHAPES, project, rope
from one_device import BATCH, LENGTH, compare
from ringattn_core import MaskInfo, ring_attention, to_layout

PREFIXES = np.array([150, 37])  # the tokens of image and prompt of each row; they may differ in every batch
assert len(PREFIXES) == BATCH


def dense() -> jax.Array:
    """The mask `[B, 1, T, S]`: causal, OR within the prefix of the row."""
    query, key = np.arange(LENGTH)[:, None], np.arange(LENGTH)
    prefix = key < PREFIXES[:, None, None]
    return jnp.asarray(((key <= query) | prefix)[:, None])


def layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, **ring) -> jax.Array:
    query, key, value = project(weights, x, "query", "key", "value")
    query, key = rope(query, positions), rope(key, positions)
    if ring:
        prefixes = MaskInfo.from_prefixes(PREFIXES, total=LENGTH)  # in natural order, so reordered like the tokens
        prefixes = jax.tree.map(lambda x: to_layout(x, ring["layout"], mesh=ring["mesh"], axis_name="sp"), prefixes)
        out = ring_attention(query, key, value, mask_info=prefixes, **ring)
    else:
        out = jax.nn.dot_product_attention(query, key, value, mask=dense())
    return x + jnp.einsum("btnh,nhc->btc", out, weights["out"])


if __name__ == "__main__":
    compare(layer, SHAPES, {"dp": 2, "sp": 4}, layout="zigzag")
