# SPDX-License-Identifier: Apache-2.0
"""The interface between core and a block kernel: a `Block` in, a `Partial` or `Gradients` out."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Shaped, UInt32

from ..masks.reach import Reach
from ..placement.arrays import axes_with, letters_of
from .bits import WORD, words_of
from .packing import Packed, Pair, unpack
from .rule import Rule


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Block:
    """One shard of queries against one shard of keys and values, with everything that decides their scores.

    Positions, indices and ids are global. An axis written `b`, `n` or `t` is either 1 or the full `B`, `N`, `T`. An
    optional array is `None` if the call does not use its option. Any part of a block is a block too (`tile`).

    Padding, where a segment id is negative, holds finite numbers, and zeros in `dout` and `delta`. A kernel may assume
    nothing else about values, but needs no code for non-finite ones.

    Args:
        q: The queries.
        kv: Keys and values: one packed array, or a pair `(k, v)` with `expand`, or if a rank does not pass its own keys
            on. The properties `k` and `v` read both forms.
        first: The first key position that each query sees, inclusive; `None` is no bound. Every mask by position is in
            `first` and `last`. If both are given, a query that sees no key has the largest int32 as `first` and the
            least as `last`, and else `first <= last`, so one unsigned comparison, `position - first <= last - first`,
            tests both.
        last: The last key position that each query sees, inclusive. For a kernel that sets `key_indices`, as some of
            `from_flash` do, `first`, `last` and `kv_positions` are not positions but indices of the keys of this block;
            an end beyond the block may be any number beyond its keys.
        q_positions: The positions of queries, for ALiBi. They may come from the caller, in any order, and are below
            2^30 in magnitude: the difference of two fits int32.
        kv_positions: The positions of keys.
        q_index: Indices in the global sequence decide dropout. They are at least 0, and increase within a shard.
        kv_index: The indices of keys, which increase too. A negative one marks a key that `padded_to` added, behind all
            others; no query sees it.
        batch_index: The global row of the batch, for dropout.
        head_index: The global query head, for dropout.
        q_segments: Segment ids: any int32. A query sees the keys with its own id; every negative id is padding, which
            sees nothing and is seen by nothing, not even by padding with an equal id.
        kv_segments: The segment ids of keys; `None` exactly where `q_segments` is.
        bias: The columns of the bias for these keys. It is added after the scale and the soft cap. An entry below
            `BIAS_FORBIDS` forbids its pair, as -inf does (`visibility.with_forbidden`).
        bits: All masks that are no intervals, and chosen keys: bit `k % 32` of word `k // 32`, with `k = j // grain`,
            says whether a query sees key `j` of this block. There are `m` sets of words.
        bits_of_head: For each head, the number of its set of words. `None`: head `n` of `N` has set `n * m // N`, so
            heads of a group share a set, unless there are more sets than key heads.
        grain: How many keys a bit is for: 1, unless the call has `selected`. The last bit may be for fewer.
        slopes: ALiBi: `slopes * |q_position - kv_position|` is subtracted from the scores.
        seed: The dropout seed of each row of the batch.
        rule: What one score is, such as scale and soft cap, and tile sizes.
        reach: What positions alone let a query see, for schedules: `first` and `last` already say it.
        monotone: Positions of keys, `first` and `last` do not decrease from token to token. By these alone, the tiles
            that a tile sees then form one run, both of keys and of queries.
        padded: Whether `padded_to` added keys.
        final: Outputs and gradients may have the dtypes of the inputs, because core neither continues, sums nor merges
            them; otherwise they must be float32.
        bias_fixed: The bias is not differentiated, so `dbias` may be `None`.
        keys_from: For kernels with `static_masks` only: "own" if the keys are those of this rank, else the layout.
        out: For `backward` of kernels with `static_masks` only: the output over all keys and sinks, as the caller got
            it.
    """

    q: Float[Array, "B T N H"]
    kv: Packed | Pair
    first: Int32[Array, "b n T"] | None
    last: Int32[Array, "b n T"] | None
    q_positions: Int32[Array, "b T"]
    kv_positions: Int32[Array, "b S"]
    q_index: Int32[Array, "b T"]
    kv_index: Int32[Array, "b S"]
    batch_index: Int32[Array, " B"]
    head_index: Int32[Array, " N"]
    q_segments: Int32[Array, "B T"] | None
    kv_segments: Int32[Array, "B S"] | None
    bias: Float[Array, "b n t S"] | None
    bits: UInt32[Array, "b m T W"] | None
    bits_of_head: Int32[Array, " N"] | None
    slopes: Float32[Array, "b N"] | None
    seed: UInt32[Array, " B"] | None
    rule: Rule = dataclasses.field(metadata={"static": True})
    grain: int = dataclasses.field(default=1, metadata={"static": True})
    reach: Reach = dataclasses.field(default=Reach(), metadata={"static": True})
    monotone: bool = dataclasses.field(default=False, metadata={"static": True})
    padded: bool = dataclasses.field(default=False, metadata={"static": True})
    final: bool = dataclasses.field(default=False, metadata={"static": True})
    bias_fixed: bool = dataclasses.field(default=False, metadata={"static": True})
    keys_from: str | None = dataclasses.field(default=None, metadata={"static": True})
    out: Float[Array, "B T N Hv"] | None = None

    @property
    def k(self) -> Float[Array, "B S K H"]:
        """The keys."""
        return self._pair[0]

    @property
    def v(self) -> Float[Array, "B S K Hv"]:
        """The values."""
        return self._pair[1]

    @property
    def _pair(self) -> Any:
        # Not `unpack` of a pair: in a rule of `vmap` its arrays have an axis more than the annotations of `unpack` say.
        return self.kv if isinstance(self.kv, tuple) else unpack(self.kv, self.q.shape[-1])

    @property
    def q_length(self) -> int:
        """The number of queries in this block."""
        return self.q.shape[1]

    @property
    def kv_length(self) -> int:
        """The number of keys in this block, not in the whole sequence."""
        return self.kv_index.shape[1]

    @property
    def kv_heads(self) -> int:
        """The number of key heads in this block."""
        return jax.tree.leaves(self.kv)[0].shape[-2]

    @property
    def group(self) -> int:
        """How many query heads read one key head."""
        return self.q.shape[2] // self.kv_heads

    @property
    def value_dim(self) -> int:
        """The head size of the values."""
        if isinstance(self.kv, tuple):
            return self.kv[1].shape[-1]
        return self.kv.shape[-1] if self.kv.ndim == 5 else self.kv.shape[-1] - self.q.shape[-1]

    def map_queries(self, f: Callable[[jax.Array, int], jax.Array]) -> "Block":
        """Replaces every array `x` that has a query axis `a` of full length by `f(x, a)`."""
        return self._mapped(f, axes_with(Block, "T", "t"), self.q_length)

    def map_keys(self, f: Callable[[jax.Array, int], jax.Array]) -> "Block":
        """Replaces every array `x` that has a key axis `a` by `f(x, a)`. Not `bits`, which has words of many keys."""
        kv = jax.tree.map(lambda x: f(x, x.ndim - 3), self.kv)
        return dataclasses.replace(self._mapped(f, axes_with(Block, "S"), self.kv_length), kv=kv)

    def tile(self, q_start: Any, q_size: int, kv_start: Any, kv_size: int) -> "Block":
        """The part of the block with these queries and keys; the starts may be traced.

        If the block has bits, `kv_start` is a multiple of the keys of a word, `32 * grain`.
        """
        rows = self.map_queries(lambda x, axis: jax.lax.dynamic_slice_in_dim(x, q_start, q_size, axis))
        tile = rows.map_keys(lambda x, axis: jax.lax.dynamic_slice_in_dim(x, kv_start, kv_size, axis))
        if tile.bits is None:
            return tile
        first, count = kv_start // (WORD * self.grain), words_of(kv_size, self.grain)
        words = jax.lax.dynamic_slice_in_dim(tile.bits, first, count, 3)
        return dataclasses.replace(tile, bits=words)

    def padded_to(self, q_length: int, kv_length: int) -> "Block":
        """The block padded to these lengths: no query sees the new keys, and the caller drops the new queries."""
        block = self.map_queries(lambda x, axis: padded(x, q_length, axis, None))
        if kv_length == self.kv_length:
            return block
        block = block.map_keys(lambda x, axis: padded(x, kv_length, axis, None))
        return dataclasses.replace(
            block,
            kv=jax.tree.map(lambda x: padded(x, kv_length, x.ndim - 3), self.kv),
            kv_index=padded(self.kv_index, kv_length, 1, -1),
            bits=None if block.bits is None else padded(block.bits, words_of(kv_length, self.grain), 3),
            padded=True,
        )

    def _mapped(self, f: Callable[[jax.Array, int], jax.Array], axes: dict[str, int], length: int) -> "Block":
        given = {name: (x, axis) for name, axis in axes.items() if (x := getattr(self, name)) is not None}
        return dataclasses.replace(self, **{n: f(x, axis) for n, (x, axis) in given.items() if x.shape[axis] == length})


def padded(x: Shaped[Array, "..."], length: int, axis: int, value: float | None = 0) -> Shaped[Array, "..."]:
    """Pads `x` at the end of `axis` to `length`, with `value`, or with copies of its last entry if `value` is `None`.

    Returns `x` itself if it has that length already.
    """
    if length == x.shape[axis]:
        return x
    widths = [(0, length - x.shape[axis] if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths, mode="edge") if value is None else jnp.pad(x, widths, constant_values=value)


LETTERS: Final = letters_of(Block)
"""The letters of the axes of each array of a block, except `kv`, whose form varies."""
BIAS_FORBIDS: Final = -1e5
"""A bias below this masks its pair out, as -inf does. (Libraries write -1e9 or the least float32 to mask.)"""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Partial:
    """Attention over some of the keys: `out`, normalised over them, and `lse`, their log-sum-exp (natural logarithm).

    A commutative monoid under `merge`; the identity is (0, -inf). `out` is float32. It may have the dtype of the
    queries for a block with `final`, and always has it in the result of a ring.

    `out=None` stands for zeros, before any key is seen: a ring with attention sinks begins from `Partial(None, lse)`,
    where `lse` is the log-sum-exp of the sinks. What a kernel returns has an `out`.

    `max_logits` is the largest score of each query, after the soft cap, bias and ALiBi; -inf for a query that has seen
    no key. Sinks are no scores. It is `None` unless `rule.return_max_logits` asks for it.
    """

    out: Float[Array, "B T N Hv"] | None
    lse: Float32[Array, "B N T"]
    max_logits: Float32[Array, "B N T"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Gradients:
    """The gradients that a kernel returns for a block: float32, or the dtypes of the inputs if `block.final`.

    `dq` is the `dq` that the kernel was given plus that of this block; the others are of this block alone. `dbias` and
    `dslopes` have the shapes of `block.bias` and `block.slopes`: summed over axes of length 1 there.
    """

    dq: Float[Array, "B T N H"]
    dk: Float[Array, "B S K H"]
    dv: Float[Array, "B S K Hv"]
    dbias: Float[Array, "b n t S"] | None = None
    dslopes: Float32[Array, "b N"] | None = None

    @classmethod
    def of(
        cls,
        block: Block,
        dq: jax.Array,
        dk: jax.Array,
        dv: jax.Array,
        dbias: jax.Array | None,
        parts: jax.Array | None,
    ) -> "Gradients":
        """The gradients of a block from a kernel that returns partial sums of `dslopes`.

        `parts [B, N, ...]` are summed over all axes after the second, and over the batch if its rows share slopes.
        They are ignored if the block has no slopes.
        """
        if block.slopes is None or parts is None:
            return cls(dq, dk, dv, dbias)
        each = parts.sum(tuple(range(2, parts.ndim)))
        return cls(dq, dk, dv, dbias, each.sum(0, keepdims=True) if len(block.slopes) == 1 else each)


@runtime_checkable
class BlockKernel(Protocol):
    """Attention over one block, forward and backward. Core has the ring, derivatives, sinks, vmap, layouts and padding.

    A kernel object is hashable: JAX compiles a call once for equal objects. Without the feature GRADIENTS it needs no
    `backward`. Three attributes are optional:

    - `features`: a backend with this kernel may declare only these.
    - `static_masks = True` asks for `Block.keys_from` and `Block.out`, as kernels of `from_flash` do. Blocks with a
      rank's own keys then compile apart from other blocks.
    - `few_queries = n`: for a key head that at most `n` queries read, counted over all heads of its group, the kernel
      reads each key once and occupies the whole device. Without it, `decode_attention` cuts the keys into chunks, which
      become batch rows, and the heads of a group become queries of one head.
    """

    def forward(self, block: Block, partial: Partial | None) -> Partial:
        """Continues the online softmax from `partial` with the keys of `block`.

        If `partial.out` is `None`, there are no earlier keys; if `partial` is, there are no sinks either. A query that
        sees no key keeps its `out` and `lse`. Where `lse` is NaN, `out` becomes NaN, whether a key is seen or not.
        """
        ...

    def backward(
        self,
        block: Block,
        dout: Float[Array, "B T N Hv"],
        lse: Float32[Array, "B N T"],
        delta: Float32[Array, "B N T"],
        dq: Float32[Array, "B T N H"] | None,
    ) -> Gradients:
        """The gradients of `block`, from the cotangent `dout`; `lse` and `delta` are over all keys and sinks.

        `dq` is the sum over the blocks before; `None` means zero. The result's `dq` includes it.

        `p` is 0 for a key that is not visible, and for all keys of a query whose `lse` is -inf; else `exp(s - lse)`.
        `ds = p * (keep * dp / (1 - dropout) - delta)`, with `dp = dout v^T`, `delta = Σ dout * out - dlse`, and `keep`
        0 where dropout drops, else 1.
        """
        ...
