# SPDX-License-Identifier: Apache-2.0
"""How a rank computes keys and values from arrays that travel round the ring in their place."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.core
import jax.numpy as jnp

from ..errors import InputError, RingAttnError, in_one_line
from ..placement.arrays import as_array


@dataclasses.dataclass(frozen=True)
class Expansion:
    """The caller's `function(x, params) -> (key, value)`, on the leaves of both pytrees.

    In a `Call`, floating-point leaves of `params` are float32, so that their gradients are summed in float32; `dtypes`
    are those of the caller.
    """

    function: Callable[[Any, Any], Any]
    trees: tuple[Any, Any]
    dtypes: tuple[Any, ...]

    def __call__(self, latents: Any, params: Any) -> tuple[jax.Array, jax.Array]:
        """Keys and values of the tokens in `latents`, the leaves of `x`. `params` have the caller's dtypes."""
        of_x, of_params = self.trees
        key, value = self.function(jax.tree.unflatten(of_x, latents), jax.tree.unflatten(of_params, params))
        return key, value

    def narrowed(self, params: Any) -> list[jax.Array]:
        """`params` in the caller's dtypes."""
        return [leaf.astype(dtype) for leaf, dtype in zip(params, self.dtypes, strict=True)]


def expansion(function: Any, x: Any, params: Any) -> tuple[Expansion, list[jax.Array], list[jax.Array]]:
    """The `Expansion`, the leaves of `x`, and those of `params`. Raises unless `function` computes keys and values."""
    latents, of_x = jax.tree.flatten(jax.tree.map(lambda leaf: as_array("key", leaf), x))
    leaves, of_params = jax.tree.flatten(jax.tree.map(lambda leaf: as_array("expand_params", leaf), params))
    tokens = {leaf.shape[:2] for leaf in latents}
    if [len(shape) for shape in tokens] != [2] or not any(map(_differentiable, latents)):
        shapes = ", ".join(f"{leaf.dtype.name}{list(leaf.shape)}" for leaf in latents) or "no array"
        differ = ", which differ in rows or tokens" if len(tokens) > 1 else ""
        remedy = "With expand, every array needs the same B and S first, and one must hold floating-point numbers"
        raise InputError("key", f"has {shapes}{differ}", remedy)
    _refuse_wrong_result(function, x, params, *tokens)
    wide = [leaf.astype(jnp.float32) if _differentiable(leaf) else leaf for leaf in leaves]
    return Expansion(function, (of_x, of_params), tuple(leaf.dtype for leaf in leaves)), latents, wide


def _differentiable(x: jax.Array) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _refuse_wrong_result(function: Any, x: Any, params: Any, tokens: tuple[int, int]) -> None:
    """Raises unless `function(x, params)` is a pair of arrays over `tokens`, and reads no other traced array.

    A rank calls `function` with the tokens that arrive, so it is traced a second time with twice as many rows and
    tokens: a size that it fixes would fail inside the ring.
    """
    remedy = "It needs (x, expand_params) -> (key, value), with axes [B, S, K, H] and [B, S, K, Hv]"
    try:
        program, result = jax.make_jaxpr(function, return_shape=True)(x, params)
    except RingAttnError:
        raise
    except Exception as error:
        raise InputError("expand", f"cannot be called: {in_one_line(error).rstrip('.')}", remedy) from error
    if not _is_pair_over(tokens, result):
        fact = f"returned {jax.tree.map(lambda part: part.shape, result)} for B, S = {tokens}"
        raise InputError("expand", fact, remedy)
    for constant in program.consts:
        if isinstance(constant, jax.core.Tracer):
            fact = f"reads a traced array of shape {constant.shape} that is not an argument"
            raise InputError("expand", fact, "Pass it in expand_params, so that the ring can differentiate it")
    twice = (2 * tokens[0], 2 * tokens[1])
    fact = f"depends on the number of rows or tokens: it fits B, S = {tokens}, but for {twice} it "
    remedy = "A rank calls it with the tokens that arrive. Compute each by itself, and pass what differs by token in x"
    try:
        result = jax.eval_shape(function, jax.tree.map(lambda leaf: _of_tokens(leaf, twice), x), params)
    except RingAttnError:
        raise
    except Exception as error:
        raise InputError("expand", f"{fact}raises {in_one_line(error).rstrip('.')}", remedy) from error
    if not _is_pair_over(twice, result):
        raise InputError("expand", f"{fact}returned {jax.tree.map(lambda part: part.shape, result)}", remedy)


def _is_pair_over(tokens: tuple[int, int], result: Any) -> bool:
    shapes = [getattr(part, "shape", None) for part in result] if isinstance(result, (tuple, list)) else []
    return len(shapes) == 2 and all(shape and len(shape) == 4 and shape[:2] == tokens for shape in shapes)


def _of_tokens(leaf: Any, tokens: tuple[int, int]) -> Any:
    """The type of `leaf` with other numbers of tokens; its sharding stays."""
    return jax.typeof(leaf).update(shape=(*tokens, *leaf.shape[2:]), weak_type=False)
