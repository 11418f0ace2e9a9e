# SPDX-License-Identifier: Apache-2.0
"""Makes a block kernel of two functions: a fused attention that returns its log-sum-exp, and its backward pass."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, Protocol, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from ..errors import KernelError
from ..masks.reach import Reach
from .features import Feature
from .merge import merged, merging
from .ordering import later_than_its_send
from .protocol import Block, BlockKernel, Gradients, Partial
from .rule import Rule
from .static_masks import Piece, pieces

BEYOND_ALL_SCORES: Final = 1e30
"""The `lse` that a query with no gradients gets, so that its probabilities `exp(s - lse)` are 0.

It is finite, because some kernels treat an infinite `lse` as a special case.
"""


FEATURES: Final = frozenset({
    Feature.GRADIENTS, Feature.FLOAT32, Feature.FLOAT16, Feature.BFLOAT16, Feature.CAUSAL, Feature.GROUPED_HEADS,
    Feature.CROSS_LENGTHS, Feature.UNEQUAL_VALUE_DIM, Feature.SINKS, Feature.ZIGZAG, Feature.STRIPED,
    Feature.FUSED_BACKWARD,
})  # fmt: skip
"""All features that a backend with a kernel of `from_flash` may declare, but not CROSS_LENGTHS and CAUSAL both.

RETURN_LSE comes on top if the backward pass takes `delta`.
"""
_OF_OPTIONS: Final = tuple(
    field.name
    for field in dataclasses.fields(Block)
    if type(None) in get_args(field.type) and field.name not in ("first", "last", "keys_from", "out")
)
"""The arrays of a block, other than `first` and `last`, that are `None` unless an option of the call sets them."""


class FlashForward(Protocol):
    """A function that computes attention of `q` to `k`: if `causal`, query `i` sees keys 0 to `i`, else all keys.

    It returns the normalised output, in any dtype, and the natural log-sum-exp of the scores.
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
    """A function that returns `dq, dk, dv` in any dtype, from `p = exp(s - lse)` and `ds = p * (dp - Σ dout * out)`.

    `out` and `lse` are over all keys of the ring, but `k` and `v` are only some of them. So the function must use `out`
    and `lse` as given, and must not compute them again. A function with a further keyword parameter `delta` gets
    `Σ dout * out` minus the cotangent of `lse` there, `[B, N, T]` in float32; then `ds = p * (dp - delta)`.
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


def from_flash(forward: FlashForward, backward: FlashBackward | Callable[..., Any]) -> BlockKernel:
    """Makes a block kernel that calls `forward` and `backward` on parts of a block, with a causal mask or with none.

    Equal functions make equal kernels. A backend with such a kernel may declare the `FEATURES` of this module. It may
    also declare RETURN_LSE if `backward` has a parameter `delta`: else `backward` computes `Σ dout * out` itself, and
    cannot take the cotangent of `lse`.
    """
    return _FlashKernel(forward, backward, "delta" in inspect.signature(backward).parameters)


@dataclasses.dataclass(frozen=True)
class _FlashKernel:
    flash_forward: FlashForward
    flash_backward: Callable[..., Any]
    takes_delta: bool
    static_masks = True

    @property
    def features(self) -> frozenset[Feature]:
        return FEATURES | {Feature.RETURN_LSE} if self.takes_delta else FEATURES

    def forward(self, block: Block, partial: Partial | None) -> Partial:
        self._check(block, "forward")
        return merging(self._of_block)(block, partial)

    def _of_block(self, block: Block) -> Partial:
        return merged([self._of_piece(block, piece) for piece in pieces(block)])

    def _of_piece(self, block: Block, piece: Piece) -> Partial:
        q, k, v = _operands(block, piece)
        # In a ring, packed keys are also being sent on, unless this is the last hop. A slice is a copy already.
        if not isinstance(block.kv, tuple) and k.shape[1] == block.kv_length:
            k = later_than_its_send(k)
        out, lse = self.flash_forward(q, k, v, scale=block.rule.softmax_scale, causal=piece.causal)
        out = out if block.final else out.astype(jnp.float32)
        if piece.sees_nothing is not None:
            out = jnp.where(piece.sees_nothing[..., None, None], 0, out)
            lse = jnp.where(piece.sees_nothing[:, None], -jnp.inf, lse)
        return Partial(piece.queries.put(out, 1, 0.0), piece.queries.put(lse, 2, -jnp.inf))

    def backward(
        self, block: Block, dout: jax.Array, lse: jax.Array, delta: jax.Array, dq: jax.Array | None
    ) -> Gradients:
        self._check(block, "backward")
        found = [self._gradients(block, piece, dout, lse, delta) for piece in pieces(block)]
        sums = [functools.reduce(jnp.add, each) for each in zip(*found, strict=True)]
        return Gradients(sums[0] if dq is None else dq + sums[0], sums[1], sums[2])

    def _gradients(
        self, block: Block, piece: Piece, dout: jax.Array, lse: jax.Array, delta: jax.Array
    ) -> list[jax.Array]:
        """One piece's contribution to `dq`, `dk` and `dv`, float32 in the block's lengths, 0 outside the piece."""
        assert block.out is not None
        q, k, v = _operands(block, piece)
        out, dout, lse = piece.queries.take(block.out, 1), piece.queries.take(dout, 1), piece.queries.take(lse, 2)
        if piece.sees_nothing is not None:
            dout = jnp.where(piece.sees_nothing[..., None, None], 0, dout)
            lse = jnp.where(piece.sees_nothing[:, None], BEYOND_ALL_SCORES, lse)
        options: dict[str, Any] = {"scale": block.rule.softmax_scale, "causal": piece.causal}
        if self.takes_delta:
            options["delta"] = piece.queries.take(delta, 2)
        found = self.flash_backward(q, k, v, out, lse, dout, **options)
        parts = (piece.queries, piece.keys, piece.keys)
        return [part.put(x.astype(jnp.float32), 1, 0.0) for part, x in zip(parts, found, strict=True)]

    def _check(self, block: Block, method: str) -> None:
        """Raises if the block uses an option that `flash_forward` and `flash_backward` have no parameter for."""
        rule, reach, given = block.rule, block.reach, [name for name in _OF_OPTIONS if getattr(block, name) is not None]
        known = {name: getattr(rule, name) for name in ("fused_backward", "fwd_params", "bwd_params")}
        unequal = reach.causal and block.q_length != block.kv_length
        if rule != Rule(rule.softmax_scale, **known) or reach != Reach(reach.causal) or unequal or given:
            fact = "got a call that needs a feature which no kernel of from_flash has"
            raise KernelError(self, method, fact, "Declare only features that the documentation of from_flash lists")


def _operands(block: Block, piece: Piece) -> tuple[jax.Array, jax.Array, jax.Array]:
    return piece.queries.take(block.q, 1), piece.keys.take(block.k, 1), piece.keys.take(block.v, 1)
