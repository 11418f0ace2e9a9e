# SPDX-License-Identifier: Apache-2.0
"""What core and a backend say to each other: blocks in, partial results and gradients out."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from .features import Feature, Support
from .rule import Rule

API_VERSIONS: Final = range(1, 2)
"""The numbers of the backend API that this core speaks."""


class OwnRows(NamedTuple):
    """The queries as they came, and what comes with them on the way back, of which `finite.rows` makes what is fit.

    `lse` is -inf where a row sees nothing. Nothing depends on it where there is no `dlse`.
    """

    q: Float[Array, "B T N H"]
    dout: Float[Array, "B T N Hv"]
    out: Float[Array, "B T N Hv"]
    rest: Float[Array, "B T N Hv"] | None
    lse: Float32[Array, "B N T"]
    dlse: Float32[Array, "B N T"] | None


class Own(NamedTuple):
    """K and V as they came, with whatever is in them, and what the kernel found when it looked at them: zeros first.

    On the way back the rows too, unless there are sinks, whose gradient is made of fit ones.
    """

    k: Float[Array, "B S K H"]
    v: Float[Array, "B S K Hv"]
    found: Int32[Array, " counts"]
    rows: OwnRows | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """One shard of queries against one shard of keys and values, with all that decides their scores.

    Every position, index and id is global. Axes written `b`, `n`, `t` are either 1 or the full `B`, `N`, `T`.
    A tile of a block is a block (`tile`), so a function of a block serves at any size. A negative `kv_index`
    marks a padding key that nobody sees; only blocks with `padded` hold any.

    Core promises that queries are finite, that values are finite, and that keys are, but that one which came with
    anything but finite numbers, or whose value did, holds a NaN in `forward`: a kernel that selects by `visible`
    *after* the products then keeps NaN out of the rows that may not see it. So it is with derivatives by scores: finite
    numbers may be so large that their products are not.

    On a ring of one rank a kernel that has `counts` has K and V in `own` too. It need not read `kv` then, and what
    nobody reads is not made. On the way back it may read `own.rows`, if there are any, for `q`, `dout`, `lse` and
    `delta`, and sees to what is no number in those. Nobody asks for the gradient of a bias that is `bias_fixed`: it may
    be `None`.
    """

    q: Float[Array, "B T N H"]
    kv: Float[Array, "2 B S K H"] | Float[Array, "B S K HHv"]
    q_positions: Int32[Array, "b T"]
    kv_positions: Int32[Array, "b S"]
    q_index: Int32[Array, "b T"]
    kv_index: Int32[Array, "b S"]
    batch_index: Int32[Array, " B"]
    head_index: Int32[Array, " N"]
    q_segments: Int32[Array, "B T"] | None
    kv_segments: Int32[Array, "B S"] | None
    bias: Float[Array, "b n t S"] | None
    mask: Bool[Array, "b n T S"] | None
    slopes: Float32[Array, "b N"] | None
    seed: UInt32[Array, " B"] | None
    rule: Rule = dataclasses.field(metadata={"static": True})
    padded: bool = dataclasses.field(default=False, metadata={"static": True})
    own: Own | None = None
    bias_fixed: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def k(self) -> Float[Array, "B S K H"]:
        return self.kv[0] if self.kv.ndim == 5 else self.kv[..., : self.q.shape[-1]]

    @property
    def v(self) -> Float[Array, "B S K Hv"]:
        return self.kv[1] if self.kv.ndim == 5 else self.kv[..., self.q.shape[-1] :]

    @property
    def q_length(self) -> int:
        return self.q.shape[1]

    @property
    def kv_length(self) -> int:
        return self.kv.shape[-3]

    @property
    def group(self) -> int:
        """How many query heads read one key head."""
        return self.q.shape[2] // self.kv.shape[-2]

    @property
    def value_dim(self) -> int:
        return self.kv.shape[-1] if self.kv.ndim == 5 else self.kv.shape[-1] - self.q.shape[-1]

    def map_queries(self, f: Callable[[jax.Array, int], jax.Array]) -> "Block":
        """The block whose every array `x` with a query axis `a` of full length is `f(x, a)`."""
        optional = _rows_of(self)
        return dataclasses.replace(
            self,
            q=f(self.q, 1),
            q_positions=f(self.q_positions, 1),
            q_index=f(self.q_index, 1),
            own=None if self.own is None else self.own._replace(rows=None),
            **{name: f(getattr(self, name), axis) for name, axis in optional},
        )

    def map_keys(self, f: Callable[[jax.Array, int], jax.Array]) -> "Block":
        """The block whose every array `x` with a key axis `a` is `f(x, a)`."""
        optional = [(name, axis) for name, axis in _KEY_AXES if getattr(self, name) is not None]
        return dataclasses.replace(
            self,
            kv=f(self.kv, self.kv.ndim - 3),
            kv_positions=f(self.kv_positions, 1),
            kv_index=f(self.kv_index, 1),
            own=None,
            **{name: f(getattr(self, name), axis) for name, axis in optional},
        )

    def tile(self, q_start: Any, q_size: int, kv_start: Any, kv_size: int) -> "Block":
        """The block of these queries against these keys; the starts may be traced."""
        rows = self.map_queries(lambda x, axis: jax.lax.dynamic_slice_in_dim(x, q_start, q_size, axis))
        return rows.map_keys(lambda x, axis: jax.lax.dynamic_slice_in_dim(x, kv_start, kv_size, axis))

    def padded_to(self, q_length: int, kv_length: int) -> "Block":
        """The block grown to these lengths: new keys are seen by nobody, new queries are cut by the caller."""
        q_more, kv_more = q_length - self.q_length, kv_length - self.kv_length
        block = self
        if q_more:
            block = block.map_queries(lambda x, axis: _grow(x, axis, q_more, "edge"))
        if kv_more:
            kv_index = _grow(block.kv_index, 1, kv_more, "constant", -1)
            block = block.map_keys(lambda x, axis: _grow(x, axis, kv_more, "edge"))
            kv = _grow(self.kv, self.kv.ndim - 3, kv_more, "constant")
            block = dataclasses.replace(block, kv=kv, kv_index=kv_index, padded=True)
        return block


_KEY_AXES: Final = (("kv_segments", 1), ("bias", 3), ("mask", 3))


def _rows_of(block: Block) -> list[tuple[str, int]]:
    names = [("q_segments", 1), ("mask", 2)] if block.mask is not None else [("q_segments", 1)]
    if block.bias is not None and block.bias.shape[2] == block.q_length:
        names.append(("bias", 2))
    return [(name, axis) for name, axis in names if getattr(block, name) is not None]


def _grow(x: jax.Array, axis: int, more: int, mode: str, value: int = 0) -> jax.Array:
    widths = [(0, more if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths, mode="edge") if mode == "edge" else jnp.pad(x, widths, constant_values=value)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Partial:
    """What some keys contribute to each query: `out` normalised over them, `lse` the natural log of their weight.

    A commutative monoid under `merge`; the identity is (0, -inf). `empty` says that this is the identity, where that is
    known when the program is traced: a kernel may then leave all arrays unread, and XLA will not make them. `rest`, if
    given, is asked for: what rounding took from `out`. `found` is what a kernel that was given `block.own` has for the
    `found` of it from then on.
    """

    out: Float32[Array, "B T N Hv"]
    lse: Float32[Array, "B N T"]
    empty: bool = dataclasses.field(default=False, metadata={"static": True})
    rest: Float[Array, "B T N Hv"] | None = None
    found: Int32[Array, " counts"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradients:
    """What one block adds to each gradient, in float32.

    `dq` continues the one given; `dk`, `dv` and `dbias` are this block's alone. `dbias` has the shape of
    `block.bias`, and may be `None` where that is `bias_fixed`; `dslopes` has that of `block.slopes`. Each is summed
    over the axes that are 1 there.
    """

    dq: Float32[Array, "B T N H"]
    dk: Float32[Array, "B S K H"]
    dv: Float32[Array, "B S K Hv"]
    dbias: Float32[Array, "b n t S"] | None = None
    dslopes: Float32[Array, "b N"] | None = None


@runtime_checkable
class BlockKernel(Protocol):
    """The easy door: two functions of one block. Core drives the ring, and owns AD, sinks, vmap and layouts.

    The object is hashable: JAX compiles once for each. An optional third function, `tie(x, token) -> x`, returns `x`
    such that nothing that reads it starts before `token` is there; the default is `contract.ordering.tie`. An optional
    attribute `separate_sends`, where true, says that its platform keeps several permutes in flight: keys and the
    gradients behind them then travel as two arrays, each in its own dtype, and need not be joined and split.

    Four more save passes over memory. `keys_and_values(k, v, poison)` and `rows(q, dout, out, rest, lse, dlse, seen)`
    stand for those of `contract.nonfinite`. With `any_queries` the queries of `forward` may hold anything: a row with
    what is not finite is NaN, in `out` and `lse`, if it sees any key, and touches no other row; a bias of -inf hides
    keys from it too. With `finishes` the kernel gives what is final where a ring has one rank: `forward` gives `out` in
    the dtype that `partial.out` has, with `rest` where `partial` has one, and where `dq` of `backward` is `None` there
    is nothing to continue, and each gradient has the dtype of its input. One that finishes may have a number of
    `counts` too: K and V then come as they are in `block.own`, with as many zeros in `own.found`, and need not be
    packed. What `forward` returns as `found`, of the same shape, is what `own.found` holds in `backward`, where
    without sinks `own.rows` is what `rows` is given.
    """

    def forward(self, block: Block, partial: Partial) -> Partial:
        """Continues the online softmax from `partial` with the keys of `block`."""
        ...

    def backward(
        self,
        block: Block,
        dout: Float[Array, "B T N Hv"],
        lse: Float32[Array, "B N T"],
        delta: Float32[Array, "B N T"],
        dq: Float32[Array, "B T N H"] | None,
    ) -> Gradients:
        """The gradients of the block's keys and queries, from the final `lse` over all keys and sinks.

        `p = exp(s - lse)` where visible, else 0; `ds = p * (keep * dp / (1 - dropout) - delta)`.
        """
        ...


class RingKernel(Protocol):
    """The free door: the whole per-shard function (see `signature.RingAttention`), ring included."""

    def __call__(self, query: Any, key: Any, value: Any, **options: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Backend:
    """What a backend wheel registers: inert, so that importing it imports no kernel and touches no device.

    `kernel` or `ring`, and `probe`, are `"module:attribute"`. `api` is the literal number of the API that the
    backend was written for. The probe returns why the backend cannot run here, in a sentence, or `None`. `reasons` may
    say why a feature is not supported, in words that follow "planned:" or "impossible:".
    """

    name: str
    api: int
    platforms: tuple[str, ...]
    features: Mapping[Feature, Support]
    kernel: str | None = None
    ring: str | None = None
    priority: int = 0
    probe: str | None = None
    reasons: Mapping[Feature, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.kernel is None) == (self.ring is None):
            raise ValueError(f"Backend {self.name!r}: exactly one of {self.kernel=} and {self.ring=} must be given")

    def supports(self, feature: Feature) -> bool:
        return self.features.get(feature) is Support.FULL

    def answer(self, feature: Feature) -> str:
        """How far it supports the feature, with its reason where it gives one."""
        support = self.features.get(feature)
        word = "not declared" if support is None else support.value
        return f"{word}: {self.reasons[feature]}" if feature in self.reasons else word
