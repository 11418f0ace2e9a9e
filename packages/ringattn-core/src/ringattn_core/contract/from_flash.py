# SPDX-License-Identifier: Apache-2.0
"""A block kernel made of two functions: a fused attention that returns its log-sum-exp, and its backward pass."""

import dataclasses
import functools
from typing import Final, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from ..errors import KernelError
from .merge import merge, merging
from .protocol import Block, BlockKernel, Gradients, Partial
from .rule import Rule
from .static_masks import Piece, pieces
from .varying import align, axes_of

BEYOND_ALL_SCORES: Final = 1e30
"""The `lse` of a query whose gradients are dropped: its probabilities are then 0. Finite, for kernels that have a
meaning of their own for infinity."""


class FlashForward(Protocol):
    """Attention of some queries to some keys: query `i` sees the keys up to `i` if `causal`, else all.

    Returns the normalised output, in any dtype, and the natural log-sum-exp of the scores.
    """

    def __call__(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K Hv"],
        *,
        scale: float,
        causal: bool,
    ) -> tuple[Float[Array, "B T N Hv"], Float32[Array, "B N T"]]: ...


class FlashBackward(Protocol):
    """`dq, dk, dv` in any dtype, from `out` and `lse` as given: `p = exp(s - lse)`, `ds = p * (dp - Σ dout * out)`.

    They are those over all keys of the ring, of which `k` and `v` are a part: nothing may be computed again from `k`.
    """

    def __call__(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K Hv"],
        out: Float[Array, "B T N Hv"],
        lse: Float32[Array, "B N T"],
        dout: Float[Array, "B T N Hv"],
        *,
        scale: float,
        causal: bool,
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K Hv"]]: ...


def from_flash(forward: FlashForward, backward: FlashBackward) -> BlockKernel:
    """A block kernel that calls `forward` and `backward`, with a mask that is causal or none, on parts of a block.

    Equal functions make equal kernels. Its backend may declare GRADIENTS, dtypes, CAUSAL, GROUPED_HEADS, SINKS,
    UNEQUAL_VALUE_DIM, ZIGZAG, STRIPED and TWO_WAY. RETURN_LSE it may not: a backward pass that computes
    `delta = Σ dout * out` itself has no place for the cotangent of `lse`.
    """
    return _FlashKernel(forward, backward)


@dataclasses.dataclass(frozen=True)
class _FlashKernel:
    flash_forward: FlashForward
    flash_backward: FlashBackward
    static_masks = True

    def forward(self, block: Block, partial: Partial | None) -> Partial:
        self._check(block, "forward")
        return merging(self._of_block)(block, partial)

    def _of_block(self, block: Block) -> Partial:
        return functools.reduce(merge, (self._of_piece(block, piece) for piece in pieces(block)))

    def _of_piece(self, block: Block, piece: Piece) -> Partial:
        q, k, v = _operands(block, piece)
        out, lse = self.flash_forward(q, k, v, scale=block.rule.scale, causal=piece.causal)
        out, lse = align((out, lse), axes_of(q, k, v))
        out = out if block.final else out.astype(jnp.float32)
        if piece.unseeing is not None:
            out, lse = jnp.where(_of_rows(piece), 0, out), jnp.where(piece.unseeing[:, None], -jnp.inf, lse)
        return Partial(piece.queries.put(out, 1, 0.0), piece.queries.put(lse, 2, -jnp.inf))

    def backward(
        self, block: Block, dout: jax.Array, lse: jax.Array, delta: jax.Array, dq: jax.Array | None
    ) -> Gradients:
        self._check(block, "backward")
        found = [self._gradients(block, piece, dout, lse) for piece in pieces(block)]
        sums = [functools.reduce(jnp.add, each) for each in zip(*found, strict=True)]
        return Gradients(sums[0] if dq is None else dq + sums[0], sums[1], sums[2])

    def _gradients(self, block: Block, piece: Piece, dout: jax.Array, lse: jax.Array) -> list[jax.Array]:
        """What one call adds to `dq`, `dk` and `dv` of the block, in float32."""
        assert block.out is not None
        q, k, v = _operands(block, piece)
        out, dout, lse = piece.queries.take(block.out, 1), piece.queries.take(dout, 1), piece.queries.take(lse, 2)
        if piece.unseeing is not None:
            dout = jnp.where(_of_rows(piece), 0, dout)
            lse = jnp.where(piece.unseeing[:, None], BEYOND_ALL_SCORES, lse)
        found = self.flash_backward(q, k, v, out, lse, dout, scale=block.rule.scale, causal=piece.causal)
        found = align(found, axes_of(q, k, v, dout))
        parts = (piece.queries, piece.keys, piece.keys)
        return [part.put(x.astype(jnp.float32), 1, 0.0) for part, x in zip(parts, found, strict=True)]

    def _check(self, block: Block, method: str) -> None:
        """Raises for a call with an option that the two functions know nothing of."""
        rule, arrays = block.rule, (block.q_segments, block.bias, block.mask, block.slopes, block.seed)
        known = {name: getattr(rule, name) for name in ("fused_backward", "fwd_params", "bwd_params")}
        unequal = rule.causal and block.q_length != block.kv_length
        if rule != Rule(rule.scale, rule.causal, **known) or unequal or any(x is not None for x in arrays):
            raise KernelError(
                self,
                method,
                "got a call that needs a feature which no kernel of from_flash has",
                "Declare only features that the documentation of from_flash lists",
            )


def _operands(block: Block, piece: Piece) -> tuple[jax.Array, jax.Array, jax.Array]:
    return piece.queries.take(block.q, 1), piece.keys.take(block.k, 1), piece.keys.take(block.v, 1)


def _of_rows(piece: Piece) -> jax.Array:
    """`piece.unseeing` with the axes of an output."""
    assert piece.unseeing is not None
    return piece.unseeing[:, :, None, None]
