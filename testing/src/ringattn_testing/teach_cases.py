# SPDX-License-Identifier: Apache-2.0
"""Random operands for `teach`, its loss and gradients, and comparisons with those of the oracle `taught`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .choosing import log_sum_exp, seen_pairs, taught

B, T = 2, 48
NAMES = ("index_query", "index_key", "weights")
"""The arrays that `teach` differentiates by."""


def drawn(
    seed: int,
    *,
    tokens: int = T,
    keys: int = T,
    heads: tuple[int, int, int] = (4, 4, 2),
    sizes: tuple[int, int] = (8, 8),
    of_groups: int = 0,
    dtype: Any = jnp.float32,
) -> dict[str, Any]:
    """Arrays of an indexer and of an attention, without its `lse`.

    `heads` are the numbers of index heads, query heads and key heads; `sizes` are those of an index head and of a head.
    """
    rng = np.random.default_rng(seed)
    (index_heads, query_heads, key_heads), (dim, size) = heads, sizes
    shapes = {
        "index_query": (B, tokens, index_heads, dim),
        "index_key": (B, keys, *([of_groups] if of_groups else []), dim),
        "weights": (B, tokens, index_heads),
        "query": (B, tokens, query_heads, size),
        "key": (B, keys, key_heads, size),
    }
    return {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}


def segments(seed: int, tokens: int = T) -> np.ndarray:
    """Documents of random lengths, and padding in the middle and at the end."""
    ids = np.sort(np.random.default_rng(seed).integers(0, 4, (B, tokens)), 1).astype(np.int32)
    ids[0, tokens // 2 : tokens // 2 + 3], ids[1, -5:] = -1, -1
    return ids


def ids_of(seed: int, choices: int, size: int, keys: int = T, tokens: int = T) -> np.ndarray:
    """Ids at random, repeated ones and blocks after the query among them; some queries choose nothing."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(-1, -(-keys // size), (B, tokens, choices, 4)).astype(np.int32)
    ids[:, ::7] = -1
    return ids


def with_lse(arrays: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The arrays with the `lse` of attention to all keys that the options let a query see."""
    ids = options.get("q_segment_ids")
    seen = seen_pairs(arrays["query"].shape[1], arrays["key"].shape[1], options.get("causal", False), ids, ids)
    scores = {name: options[name] for name in ("softmax_scale", "logits_soft_cap") if name in options}
    lse = log_sum_exp(arrays["query"], arrays["key"], seen[:, None], **scores)
    return arrays | {"lse": jnp.asarray(lse, jnp.float32)}


def graded(teacher: Any, arrays: dict[str, Any]) -> Any:
    """The loss and its gradients by the arrays of the indexer; `None` for an array that is not there."""

    def loss(learning: dict[str, Any], others: dict[str, Any]) -> Any:
        return teacher(**learning, **others)

    learning = {name: arrays[name] for name in NAMES}
    others = {name: x for name, x in arrays.items() if name not in NAMES}
    value, gradients = jax.jit(jax.value_and_grad(loss))(learning, others)
    return value, [gradients[name] for name in NAMES]


def close(got: Any, wanted: Any, atol: float = 2e-5) -> None:
    """The loss is near, and each gradient up to `atol` of its largest entry."""
    value, gradients = got
    assert value.dtype == jnp.float32
    np.testing.assert_allclose(value, wanted[0], rtol=atol, atol=atol)
    for name, gradient, exact in zip(NAMES[: len(wanted[1])], gradients, wanted[1], strict=True):
        if gradient is None:
            continue
        largest = np.abs(exact).max()
        np.testing.assert_allclose(np.float64(gradient), exact, rtol=0, atol=atol * largest, err_msg=name)


def small_derivatives_are_kept(teacher: Any, arrays: dict[str, Any], atol: float) -> None:
    """With a loss scale, as float16 is trained: derivatives of products are about 1e-6 before it."""
    options: dict[str, Any] = {"causal": True}
    arrays = with_lse(arrays | {"weights": arrays["weights"] * jnp.float16(2**-14)}, options)
    _, gradients = graded(lambda **x: teacher(**x, **options) * 2**14, arrays)
    _, wanted = taught(**arrays, **options)
    for name, got, want in list(zip(NAMES, gradients, wanted, strict=True))[:2]:
        want = np.asarray(want) * 2**14
        assert np.abs(np.float64(got) - want).max() <= atol * np.abs(want).max(), name
