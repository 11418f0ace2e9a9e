# SPDX-License-Identifier: Apache-2.0
"""Makes a block kernel of two functions: a fused attention that returns its log-sum-exp, and its backward pass."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, Final, Protocol, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from ..errors import InputError, KernelError
from ..masks.reach import Reach
from .features import Feature
from .key_ranges import ranged
from .merge import merged, merging
from .ordering import later_than_its_send
from .protocol import Block, BlockKernel, Gradients, Partial
from .rule import Rule
from .static_masks import WHOLE, Piece, pieces

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

RETURN_LSE comes on top if the backward pass takes `delta`, and `FEATURES_OF_RANGES` if the functions take `first` and
`last`.
"""
FEATURES_OF_RANGES: Final = frozenset({
    Feature.SLIDING_WINDOW, Feature.CHUNKED, Feature.KEY_RANGE, Feature.SEGMENT_IDS,
})  # fmt: skip
"""What a backend may declare too if the functions take `first` and `last`; CROSS_LENGTHS and CAUSAL may then be both.

MASK_BUILDER and ATTENTION_MASK are not among them: a query may see any keys by these, not only keys that follow one
another.
"""
_OF_OPTIONS: Final = tuple(
    field.name
    for field in dataclasses.fields(Block)
    if type(None) in get_args(field.type) and field.name not in ("first", "last", "keys_from", "out")
)
"""The arrays of a block, other than `first` and `last`, that are `None` unless an option of the call sets them."""
_IDS: Final = ("q_segments", "kv_segments")
_ENDS: Final = frozenset({"first", "last"})


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


class FlashForwardOfRanges(Protocol):
    """As `FlashForward`, but query `i` of a batch row and head sees the keys from `first[i]` to `last[i]`, inclusive.

    `first` and `last` are always arrays, int32 `[b, n, T]`: `b` is 1 or `B`, and `n` is 1 or `N`. They are indices of
    the keys of this call: `0 <= first <= last <= S - 1`. A query that sees none of the keys has `first = S` and
    `last = -1`, and its results are dropped: they may be anything, NaN too.

    The backward function is as `FlashBackward`, with the same two parameters. A query that sees none of the keys has
    zeros as `dout` and `BEYOND_ALL_SCORES` as `lse`, so its `p` and its `ds` are 0.

    Either function may have a keyword parameter `causal` too. It is `True` where `first` and `last` say just that query
    `i` sees the keys 0 to `i`, for which the function may know a faster schedule, and else `False`.
    """

    def __call__(
        self,
        q: Float[Array, "B T N H"],
        k: Float[Array, "B S K H"],
        v: Float[Array, "B S K Hv"],
        *,
        scale: float,
        first: Int32[Array, "b n T"],
        last: Int32[Array, "b n T"],
    ) -> tuple[Float[Array, "B T N Hv"], Float32[Array, "B N T"]]: ...


def from_flash(
    forward: FlashForward | FlashForwardOfRanges, backward: FlashBackward | Callable[..., Any]
) -> BlockKernel:
    """Makes a block kernel that calls `forward` and `backward` on parts of a block.

    The functions compute a causal mask or none. With keyword parameters `first` and `last`, both functions compute
    every mask whose rows are keys that follow one another, and get all keys of a block in one call.

    Equal functions make equal kernels. A backend with such a kernel may declare the `FEATURES` of this module, and with
    `first` and `last` also `FEATURES_OF_RANGES`. It may declare RETURN_LSE if `backward` has a parameter `delta`: else
    `backward` computes `Σ dout * out` itself, and cannot take the cotangent of `lse`.
    """
    of_forward, of_backward = _optional_parameters(forward), _optional_parameters(backward)
    ends = of_forward & _ENDS, of_backward & _ENDS
    if ends not in ((_ENDS, _ENDS), (set(), set())):
        took = (", ".join(sorted(x)) or "neither" for x in ends)
        fact = "of first and last, forward takes {}, and backward {}".format(*took)
        raise InputError("from_flash", fact, "Give both functions both parameters, or neither")
    return _FlashKernel(forward, backward, of_forward, of_backward)


def _optional_parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Which of the parameters `first`, `last`, `causal` and `delta` a function has; none if it has no signature."""
    try:
        return frozenset(inspect.signature(function).parameters) & {*_ENDS, "causal", "delta"}
    except ValueError:
        return frozenset()


@dataclasses.dataclass(frozen=True)
class _FlashKernel:
    flash_forward: Callable[..., Any]
    flash_backward: Callable[..., Any]
    of_forward: frozenset[str]
    of_backward: frozenset[str]
    """What `_optional_parameters` says of the two functions."""
    static_masks = True

    @property
    def key_indices(self) -> bool:
        """Whether the functions take `first` and `last`."""
        return "first" in self.of_forward

    @property
    def features(self) -> frozenset[Feature]:
        with_lse = {Feature.RETURN_LSE} if "delta" in self.of_backward else set()
        return FEATURES | with_lse | (FEATURES_OF_RANGES if self.key_indices else set())

    def forward(self, block: Block, partial: Partial | None) -> Partial:
        self._check(block, "forward")
        return merging(self._of_block)(block, partial)

    def _of_block(self, block: Block) -> Partial:
        return merged([self._of_piece(block, piece) for piece in self._pieces(block)])

    def _pieces(self, block: Block) -> list[Piece]:
        return [ranged(block)] if self.key_indices else pieces(block)

    def _of_piece(self, block: Block, piece: Piece) -> Partial:
        q, k, v = _operands(block, piece)
        # In a ring, packed keys are also being sent on, unless this is the last hop. Other parts are copies already.
        if not isinstance(block.kv, tuple) and piece.keys is WHOLE:
            k = later_than_its_send(k)
        out, lse = self.flash_forward(q, k, v, scale=block.rule.softmax_scale, **self._mask(piece, self.of_forward))
        out = out if block.final else out.astype(jnp.float32)
        if piece.sees_nothing is not None:
            out = jnp.where(_by_query(piece.sees_nothing), 0, out)
            lse = jnp.where(piece.sees_nothing, -jnp.inf, lse)
        return Partial(piece.queries.put(out, 1, 0.0), piece.queries.put(lse, 2, -jnp.inf))

    def _mask(self, piece: Piece, parameters: frozenset[str]) -> dict[str, Any]:
        """The keyword arguments that say which keys a query of the piece sees, for a function of these `parameters`."""
        if not self.key_indices:
            return {"causal": piece.causal}
        causal = {"causal": piece.causal} if "causal" in parameters else {}
        return {"first": piece.first, "last": piece.last, **causal}

    def backward(
        self, block: Block, dout: jax.Array, lse: jax.Array, delta: jax.Array, dq: jax.Array | None
    ) -> Gradients:
        self._check(block, "backward")
        found = [self._gradients(block, piece, dout, lse, delta) for piece in self._pieces(block)]
        sums = [functools.reduce(jnp.add, each) for each in zip(*found, strict=True)]
        return Gradients(sums[0] if dq is None else dq + sums[0], sums[1], sums[2])

    def _gradients(
        self, block: Block, piece: Piece, dout: jax.Array, lse: jax.Array, delta: jax.Array
    ) -> list[jax.Array]:
        """One piece's contribution to `dq`, `dk` and `dv`, float32 in the block's lengths, 0 outside the piece."""
        assert block.out is not None
        q, k, v = _operands(block, piece)
        out, dout, lse = piece.queries.take(block.out, 1), piece.queries.take(dout, 1), piece.queries.take(lse, 2)
        options: dict[str, Any] = {"scale": block.rule.softmax_scale, **self._mask(piece, self.of_backward)}
        if "delta" in self.of_backward:
            options["delta"] = piece.queries.take(delta, 2)
        if piece.sees_nothing is not None:
            dout = jnp.where(_by_query(piece.sees_nothing), 0, dout)
            lse = jnp.where(piece.sees_nothing, BEYOND_ALL_SCORES, lse)
        found = self.flash_backward(q, k, v, out, lse, dout, **options)
        parts = (piece.queries, piece.keys, piece.keys)
        return [part.put(x.astype(jnp.float32), 1, 0.0) for part, x in zip(parts, found, strict=True)]

    def _check(self, block: Block, method: str) -> None:
        """Raises if the block uses an option that `flash_forward` and `flash_backward` have no parameter for."""
        rule, reach = block.rule, block.reach
        known = {name: getattr(rule, name) for name in ("fused_backward", "fwd_params", "bwd_params")}
        options = [name for name in _OF_OPTIONS if not (self.key_indices and name in _IDS)]
        beyond = rule != Rule(rule.softmax_scale, **known) or any(getattr(block, name) is not None for name in options)
        if not self.key_indices:
            beyond |= reach != Reach(reach.causal) or (reach.causal and block.q_length != block.kv_length)
        if beyond:
            fact = "got a call that needs a feature which its functions have no parameter for"
            raise KernelError(self, method, fact, "Declare only features that the documentation of from_flash lists")


def _by_query(x: Bool[Array, "b n t"]) -> Bool[Array, "b t n 1"]:
    return jnp.swapaxes(x, 1, 2)[..., None]


def _operands(block: Block, piece: Piece) -> tuple[jax.Array, jax.Array, jax.Array]:
    return piece.queries.take(block.q, 1), piece.keys.take(block.k, 1), piece.keys.take(block.v, 1)
