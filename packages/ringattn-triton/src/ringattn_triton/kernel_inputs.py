# SPDX-License-Identifier: Apache-2.0
"""The inputs of every kernel: a block's arrays in the order of the kernel's parameters, and compile-time constants.

No array is copied or transposed, except by `nearest_tf32`, and a bias by `with_transposed_bias`. Shapes and strides are
constants, an axis of length 1 has stride 0, and an array that the call does not use is `None` and never read.
"""

import dataclasses
import math
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32
from ringattn_core.contract import dropout
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.rule import Rule

LOG2_E: Final = math.log2(math.e)
_INT32: Final = 2**31
ENOUGH_HEADS: Final = 4
"""How many heads, counted over all batch rows, must share a bias matrix `[T, S]` for a transposed copy of it to pay."""

INPUTS: Final = (
    "q", "k", "v", "q_first", "q_last", "q_positions", "kv_positions", "q_index", "kv_index", "q_counters",
    "kv_counters", "q_segments", "kv_segments", "bias", "slopes", "mask_words", "mask_of_head", "dropout_keys",
)  # fmt: skip
"""The arrays that every kernel takes first, in this order. Those after v are the fields of the kernel's parameter
`P`."""


@dataclasses.dataclass(frozen=True)
class BlockConstants:
    """The compile-time constants of a kernel for one block.

    `x_batch`, `x_token`, `x_head`, `x_query` and `x_key` are strides of array `x`, in elements. Without a soft cap a
    score is `unbend * (q k)`; with one it is `unbend * tanh(bend * (q k))`. Then a bias is added and the ALiBi penalty
    subtracted. `plain`: there is neither bias nor ALiBi, and `unbend` is positive. Kernels then leave `unbend` out of
    scores, because the largest product has the largest score. `fold` converts the results of `scores.scored` to units
    of log2. `below`: a query sees no key before its position in `q_first`; `above`: none after that in `q_last`.
    `mask_numbered`: `mask_of_head` has the number of each head's mask; else `mask_heads` neighbouring heads share one.
    `grain`: the keys of a mask bit. `mask_rows`: how many neighbouring queries share a row of words. `fast`: kernels
    may use NVIDIA's instructions. `long_offsets`: offsets into q, k, v and out need int64; `long_score_offsets`: so do
    offsets into an array `[queries, keys]`. `max_logits`: the forward kernel returns the largest score of each row too.
    """

    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    k_batch: int
    k_token: int
    k_head: int
    v_batch: int
    v_token: int
    v_head: int
    v_start: int
    long_offsets: bool
    long_score_offsets: bool
    q_first_batch: int
    q_first_head: int
    q_last_batch: int
    q_last_head: int
    q_positions_batch: int
    kv_positions_batch: int
    q_index_batch: int
    kv_index_batch: int
    scale: float
    plain: bool
    fold: float
    precision: str
    fast: bool
    capped: bool
    bend: float
    unbend: float
    below: bool
    above: bool
    segments: bool
    padded: bool
    dropout: bool
    threshold: int
    keep_weight: float
    bias: bool
    bias_batch: int
    bias_head: int
    bias_query: int
    bias_key: int
    slopes: bool
    slopes_batch: int
    masks: bool
    mask_numbered: bool
    mask_heads: int
    grain: int
    mask_rows: int
    mask_batch: int
    mask_head: int
    mask_query: int
    max_logits: bool

    @property
    def group(self) -> int:
        """How many query heads share one key head."""
        return self.heads // self.kv_heads

    @property
    def stacked(self) -> bool:
        """Whether keys and values lie in one array, all keys before all values; dk and dv then share one array too."""
        return self.v_start > 0 and self.k_head == self.head_dim

    @property
    def padded_head_dim(self) -> int:
        return padded_dim(self.head_dim)

    @property
    def padded_value_dim(self) -> int:
        return padded_dim(self.value_dim)

    @property
    def positions(self) -> bool:
        """Whether kernels read the positions of keys."""
        return self.below or self.above or self.slopes

    @property
    def ranges_by_head(self) -> bool:
        """Whether query heads differ in the positions that their queries see (`q_first` and `q_last`)."""
        return self.q_first_head > 0 or self.q_last_head > 0

    @property
    def masked(self) -> bool:
        """Whether anything but a bias may hide a key from a query."""
        return any((self.below, self.above, self.segments, self.padded, self.masks))

    @property
    def options(self) -> str:
        """The options of the call that change scores or weights, as a list for errors: "a bias, ALiBi and dropout"."""
        named = {"a soft cap": self.capped, "a bias": self.bias, "ALiBi": self.slopes, "dropout": self.dropout}
        *others, last = [name for name, used in named.items() if used] or ["no option"]
        return f"{', '.join(others)} and {last}" if others else last

    @property
    def only_masks(self) -> bool:
        """Whether scores are products of q and k, times a positive number, and nothing but masks changes weights."""
        return self.plain and not (self.capped or self.dropout)

    @property
    def by_head(self) -> bool:
        """Whether kernels read something for each head besides a bias: an ALiBi slope, a dropout key or a mask."""
        return self.slopes or self.dropout or self.masks

    @property
    def without_masks(self) -> "BlockConstants":
        """A copy with `masks` false, for a kernel that reads the words of `mask_words` in its own way."""
        return dataclasses.replace(self, masks=False)

    @property
    def without_segments(self) -> "BlockConstants":
        """A copy with `segments` false, for a kernel that compares segment ids in its own way."""
        return dataclasses.replace(self, segments=False)

    @property
    def largest_dim(self) -> int:
        return max(self.padded_head_dim, self.padded_value_dim)


class KernelInputs(NamedTuple):
    """The inputs of a kernel for one block: `arrays`, by their names in `INPUTS`, and `constants`.

    `arrays` lacks the dropout counters, which depend on the sizes of tiles: `in_tiles` computes them.
    """

    arrays: dict[str, Any]
    constants: BlockConstants

    def with_transposed_bias(self) -> "KernelInputs":
        """These inputs with the bias transposed to `[b, n, S, T]`, for kernels whose tiles of scores have keys as rows.

        Returns these inputs unchanged if fewer than `ENOUGH_HEADS` heads share the bias (the copy would cost more than
        it saves), or if the bias is missing or equal for all queries.
        """
        bias, constants = self.arrays["bias"], self.constants
        if bias is None or not constants.bias_query:
            return self
        if self.arrays["q"].shape[0] * constants.heads < ENOUGH_HEADS * bias.shape[0] * bias.shape[1]:
            return self
        changed = dataclasses.replace(constants, bias_query=1, bias_key=constants.q_length)
        return KernelInputs(self.arrays | {"bias": jnp.swapaxes(bias, 2, 3)}, changed)

    def key_gradients(self, dtype: jnp.dtype) -> list[jax.ShapeDtypeStruct]:
        """The shapes of the outputs `DK` and `DV` of a backward kernel.

        If keys and values are `stacked`, `DK` holds dk and then dv, and `DV` is one element that is not used. A ring
        sends dk and dv on as one array. If a kernel writes one array, XLA need not copy the two together.
        """
        if self.constants.stacked:
            return [jax.ShapeDtypeStruct(self.arrays["k"].shape, dtype), jax.ShapeDtypeStruct((1,), dtype)]
        dims, constants = (self.constants.head_dim, self.constants.value_dim), self.constants
        tokens = len(self.arrays["q"]), constants.kv_length, constants.kv_heads
        return [jax.ShapeDtypeStruct((*tokens, dim), dtype) for dim in dims]

    def in_tiles(self, q_tile: int, kv_tile: int, of_all_keys: bool = False) -> list[jax.Array | None]:
        """All arrays in the order of `INPUTS`, with dropout counters for these tile sizes; unused arrays are `None`.

        `of_all_keys`: if any key tile has the counter -1, all query tiles get -1 too, so that no entries share draws.
        """
        found = dict(self.arrays)
        if self.constants.dropout:
            of_queries = _first_counters(found["q_index"], q_tile)
            of_keys = _first_counters(found["kv_index"], kv_tile)
            found["q_counters"] = jnp.where((of_keys >= 0).all(), of_queries, -1) if of_all_keys else of_queries
            found["kv_counters"] = of_keys
        return [found.get(name) for name in INPUTS]


def of_block(block: Block, fast: bool = False) -> KernelInputs:
    """The inputs of the kernels for `block`; `fast` lets them use NVIDIA's instructions, such as approximate tanh."""
    rule = block.rule
    batch, q_length, heads, head_dim = block.q.shape
    kv_length, kv_heads, value_dim = block.kv_length, block.kv_heads, block.value_dim
    q, kv = jax.tree.map(lambda x: nearest_tf32(x, rule), (block.q, block.kv))
    k, v = kv if isinstance(kv, tuple) else (kv, kv)
    first, last, words = block.first, block.last, block.bits
    bias, slopes = block.bias, block.slopes
    capped = rule.logits_soft_cap is not None
    factor = rule.logits_soft_cap if rule.logits_soft_cap is not None else rule.softmax_scale
    plain = bias is None and slopes is None and factor > 0
    narrow = block.q.dtype != jnp.float32
    arrays = {
        "q": q,
        "k": k,
        "v": v,
        "q_first": first,
        "q_last": last,
        "q_positions": None if slopes is None else block.q_positions,
        "kv_positions": None if first is last is slopes is None else block.kv_positions,
        "q_index": block.q_index if rule.dropout_prob else None,
        "kv_index": block.kv_index if rule.dropout_prob or block.padded else None,
        "q_segments": block.q_segments,
        "kv_segments": block.kv_segments,
        "bias": bias,
        "slopes": slopes,
        "mask_words": words,
        "mask_of_head": None if words is None else block.bits_of_head,
        "dropout_keys": dropout.keys(block) if rule.dropout_prob else None,
    }
    # Keys and values are two arrays (on one device), or one: all keys before all values, or each token's key and value
    # side by side (`ringattn_core.contract.packing`).
    if isinstance(block.kv, tuple) or block.kv.ndim == 5:
        v_start = 0 if isinstance(block.kv, tuple) else batch * kv_length * kv_heads * value_dim
    else:
        v_start = head_dim
    constants = BlockConstants(
        q_length=q_length,
        kv_length=kv_length,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        k_batch=kv_length * kv_heads * k.shape[-1],
        k_token=kv_heads * k.shape[-1],
        k_head=k.shape[-1],
        v_batch=kv_length * kv_heads * v.shape[-1],
        v_token=kv_heads * v.shape[-1],
        v_head=v.shape[-1],
        v_start=v_start,
        long_offsets=max(
            kv_length * kv_heads * max(k.shape[-1], v.shape[-1]), q_length * heads * max(head_dim, value_dim)
        )
        >= _INT32,
        long_score_offsets=q_length * kv_length >= _INT32,
        q_first_batch=_stride(first, 0),
        q_first_head=_stride(first, 1),
        q_last_batch=_stride(last, 0),
        q_last_head=_stride(last, 1),
        q_positions_batch=_stride(block.q_positions, 0),
        kv_positions_batch=_stride(block.kv_positions, 0),
        q_index_batch=_stride(block.q_index, 0),
        kv_index_batch=_stride(block.kv_index, 0),
        scale=rule.softmax_scale,
        plain=plain,
        fold=factor * LOG2_E if plain else LOG2_E,
        precision=_precision(rule.precision, narrow, fast),
        fast=fast and narrow,
        capped=capped,
        bend=rule.softmax_scale / factor if capped else 1.0,
        unbend=factor,
        below=first is not None,
        above=last is not None,
        segments=block.q_segments is not None,
        padded=block.padded,
        dropout=bool(rule.dropout_prob),
        threshold=dropout.threshold(rule.dropout_prob),
        keep_weight=rule.keep_weight,
        bias=bias is not None,
        bias_batch=_stride(bias, 0),
        bias_head=_stride(bias, 1),
        bias_query=_stride(bias, 2),
        bias_key=1,
        slopes=slopes is not None,
        slopes_batch=_stride(slopes, 0),
        masks=words is not None,
        mask_numbered=block.bits_of_head is not None,
        mask_heads=1 if words is None else heads // words.shape[1] or 1,
        grain=block.grain,
        mask_rows=1 if words is None else q_length // words.shape[2],
        mask_batch=_stride(words, 0),
        mask_head=_stride(words, 1),
        mask_query=0 if words is None else words.shape[3],
        max_logits=rule.return_max_logits,
    )
    return KernelInputs(arrays, constants)


def nearest_tf32(x: Float[Array, "..."], rule: Rule) -> Float[Array, "..."]:
    """`x`, rounded to the nearest TF32 numbers if its products are TF32 products.

    Hopper's tensor cores cut off the last 13 bits of a float32 operand. Without rounding, products and the scores that
    are their sums would be too small, by 7e-4 of them on average.
    """
    if _precision(rule.precision, narrow=x.dtype != jnp.float32, fast=True) != "tf32":
        return x
    return jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10)


def _first_counters(index: Int32[Array, "b S"], tile: int) -> Int32[Array, "b tiles"]:
    """The dropout counter of each tile's first token: half the token's index, or -1 if tokens cannot share draws.

    The tokens of a tile can share draws if their indices are consecutive and begin at a multiple of 16
    (`kernels.dropout`). Indices increase, so the first and the last index of a tile decide. Padding has index -1, so a
    tile that ends with padding gets the counter -1.
    """
    more = -index.shape[1] % tile
    # If the block ends within the last tile, the tile is filled up with the indices that would follow.
    following = index[:, -1:] + jnp.arange(1, more + 1, dtype=index.dtype)[None]
    filled = jnp.concatenate([index, following], 1) if more else index
    of_tile = filled.reshape(index.shape[0], -1, tile)
    first = of_tile[:, :, 0]
    consecutive = of_tile[:, :, -1] - first == tile - 1
    return jnp.where(consecutive & (first >= 0) & (first % 16 == 0), first // 2, -1)


def padded_dim(size: int) -> int:
    """The least power of two that is at least `size` and at least 16: the side of a tile that holds `size` elements."""
    return max(16, power_of_two(size))


def power_of_two(size: int) -> int:
    """The least power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()


def _stride(x: jax.Array | None, axis: int) -> int:
    return 0 if x is None or x.shape[axis] == 1 else math.prod(x.shape[axis + 1 :])


def _precision(asked: str | None, narrow: bool, fast: bool) -> str:
    """The `input_precision` of `tl.dot` for the precision `asked` by the caller. `narrow`: the inputs have 16 bits.

    Products of 16-bit numbers are exact in any case. If `fast`, an exact product of float32 numbers is computed as
    three TF32 products (`tf32x3`), which are as exact as float32 sums and run on tensor cores.
    """
    if narrow:
        return "ieee"
    exact = "tf32x3" if fast else "ieee"
    return {None: exact, "default": "tf32", "high": "tf32x3"}.get(asked, "ieee")
