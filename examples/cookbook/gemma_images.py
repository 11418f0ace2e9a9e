# SPDX-License-Identifier: Apache-2.0
"""Attention of Gemma 3 with images: tokens of an image see one another, in layers with a window too."""

import jax
import jax.numpy as jnp
import numpy as np
from gemma import SHAPES, SIZE, WINDOW, projected
from one_device import BATCH, LENGTH, compare
from ringattn_core import MaskInfo, ring_attention

IMAGE = 40  # tokens of an image: longer than the window here; Gemma 3 has 256 of them, and a window of 1024
IMAGES = np.full((BATCH, LENGTH), -1)  # the number of each token's image, -1 for text; it may differ in every batch
for number, (row, start) in enumerate([(0, 40), (0, 180), (1, 8), (1, 110)]):
    IMAGES[row, start : start + IMAGE] = number


def dense(local: bool) -> jax.Array:
    """The mask `[B, 1, T, S]` as Transformers makes it: causal and within the window, OR of one image."""
    query, key = np.arange(LENGTH)[:, None], np.arange(LENGTH)
    causal = (key <= query) & (query - key < (WINDOW if local else LENGTH))
    of_one_image = (IMAGES[:, :, None] == IMAGES[:, None, :]) & (IMAGES >= 0)[:, None]
    return jnp.asarray((causal | of_one_image)[:, None])


def layer(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, local: bool, **ring) -> jax.Array:
    arrays, scale = projected(weights, x, positions, local), SIZE**-0.5
    if ring:
        # `from_spans` is causal by itself. The promise lets a local layer send only what its window and images reach.
        spans = MaskInfo.from_spans(IMAGES, window=WINDOW - 1 if local else None)
        reach = (max(WINDOW, IMAGE) - 1, IMAGE - 1) if local else None
        out = ring_attention(*arrays, mask_info=spans, max_distance=reach, softmax_scale=scale, **ring)
    else:
        out = jax.nn.dot_product_attention(*arrays, mask=dense(local), scale=scale)
    return x + jnp.einsum("btnh,nhc->btc", out, weights["out"])


def layers(weights: dict[str, jax.Array], x: jax.Array, positions: jax.Array, **ring) -> jax.Array:
    return layer(weights, layer(weights, x, positions, local=True, **ring), positions, local=False, **ring)


if __name__ == "__main__":
    compare(layers, SHAPES, {"dp": 2, "sp": 4}, layout="contiguous", strategy="auto")
