# SPDX-License-Identifier: Apache-2.0
"""The inputs of every kernel: a block's arrays in the order of the kernel's parameters, and compile-time constants.

Nothing is copied or transposed. Shapes and strides are constants, an axis of length 1 has stride 0, and an array that
the rule does not use is `None` and never read.
"""

import dataclasses
import math
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32
from ringattn_core.contract import dropout
from ringattn_core.contract.protocol import Block

from . import mask_bits

LOG2_E: Final = math.log2(math.e)
_INT32: Final = 2**31
ENOUGH_HEADS: Final = 4
"""The least number of heads, over all batch rows, that must share a bias for its transpose to be worth the copy."""

INPUTS: Final = (
    "q", "k", "v", "q_positions", "kv_positions", "q_index", "kv_index", "q_counters", "kv_counters", "q_segments",
    "kv_segments", "bias", "slopes", "mask_words", "mask_of_head", "dropout_keys",
)  # fmt: skip
"""The arrays that every kernel takes first, in this order; those after v are the fields of its parameter `P`."""


@dataclasses.dataclass(frozen=True)
class BlockConstants:
    """The constants that a kernel is compiled for; `x_batch` (`_head`, `_query`) is the stride of `x` along that axis.

    A product `q k` becomes a score by the factor `unbend`, or under a soft cap as `unbend * tanh(bend * q k)`, and a
    bias and ALiBi are added. `plain`: nothing is added and `unbend` is positive. Kernels then leave `unbend` out,
    because the largest product has the largest score. `fold` times the result of `scores.scored` is in units of log2.
    `below`, `above`: a query sees no key before, or after, some position. `wide`: offsets into q, k, v and out need
    int64; `wide_scores`: so do offsets into an array of queries times keys.
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
    wide: bool
    wide_scores: bool
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
    positions: bool
    below: bool
    above: bool
    causal: bool
    left: int | None
    right: int | None
    chunk: int | None
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
    one_mask: bool
    mask_batch: int
    mask_head: int
    mask_query: int

    @property
    def group(self) -> int:
        """How many query heads read one key head."""
        return self.heads // self.kv_heads

    @property
    def stacked(self) -> bool:
        """Whether keys and values are one array, all keys first. The gradients are written in the same way."""
        return self.v_start > 0 and self.k_head == self.head_dim

    @property
    def padded_head_dim(self) -> int:
        return padded_dim(self.head_dim)

    @property
    def padded_value_dim(self) -> int:
        return padded_dim(self.value_dim)

    @property
    def distances(self) -> bool:
        """Whether scores depend on how far a query and a key are apart."""
        return self.slopes

    @property
    def options(self) -> str:
        """The options of the call that change scores or weights, as a list for errors: "a bias, ALiBi and dropout"."""
        named = {"a soft cap": self.capped, "a bias": self.bias, "ALiBi": self.slopes, "dropout": self.dropout}
        *others, last = [name for name, used in named.items() if used] or ["no option"]
        return f"{', '.join(others)} and {last}" if others else last

    @property
    def by_head(self) -> bool:
        """Whether an option other than a bias is read for each head."""
        return self.slopes or self.dropout or self.masks

    @property
    def per_head_gradient(self) -> bool:
        """Whether the call differentiates a parameter of each head (ALiBi slopes)."""
        return self.slopes

    @property
    def without_masks(self) -> "BlockConstants":
        """The same without packed masks (`mask_bits`), for a kernel that reads their bits in its own way."""
        return dataclasses.replace(self, masks=False)

    @property
    def largest_dim(self) -> int:
        return max(self.padded_head_dim, self.padded_value_dim)


class KernelInputs(NamedTuple):
    """The operands of a kernel for one block: `arrays` by their names in `INPUTS`, and `constants`.

    Some inputs depend on the sizes of tiles, and `arrays` has none of these: `in_tiles` computes them, and returns all
    inputs in the order of `INPUTS`.
    """

    arrays: dict[str, Any]
    constants: BlockConstants

    def with_transposed_bias(self) -> "KernelInputs":
        """The same with queries on the last axis of the bias, for a kernel whose scores have keys as rows.

        Unchanged where few heads and batch rows share the bias, or all queries do: the copy would cost what it saves.
        """
        bias, constants = self.arrays["bias"], self.constants
        if bias is None or not constants.bias_query:
            return self
        if self.arrays["q"].shape[0] * constants.heads < ENOUGH_HEADS * bias.shape[0] * bias.shape[1]:
            return self
        changed = dataclasses.replace(constants, bias_query=1, bias_key=constants.q_length)
        return KernelInputs(self.arrays | {"bias": jnp.swapaxes(bias, 2, 3)}, changed)

    def key_gradients(self, dtype: jnp.dtype) -> list[jax.ShapeDtypeStruct]:
        """The outputs `DK` and `DV` of a backward kernel. If keys and values are `stacked`, `DK` holds dk and then dv.

        A ring sends dk and dv on as one array. If a kernel has written them so, XLA need not copy them together.
        """
        if self.constants.stacked:
            return [jax.ShapeDtypeStruct(self.arrays["k"].shape, dtype), jax.ShapeDtypeStruct((1,), dtype)]
        dims, constants = (self.constants.head_dim, self.constants.value_dim), self.constants
        tokens = len(self.arrays["q"]), constants.kv_length, constants.kv_heads
        return [jax.ShapeDtypeStruct((*tokens, dim), dtype) for dim in dims]

    def in_tiles(self, q_tile: int, kv_tile: int, of_all_keys: bool = False) -> list[jax.Array | None]:
        """The arrays, with the dropout counters of tiles of these sizes.

        `of_all_keys`: tiles of queries have a counter only if all tiles of keys have one.
        """
        found = dict(self.arrays)
        if self.constants.dropout:
            of_queries = _first_counters(found["q_index"], q_tile)
            of_keys = _first_counters(found["kv_index"], kv_tile)
            found["q_counters"] = jnp.where((of_keys >= 0).all(), of_queries, -1) if of_all_keys else of_queries
            found["kv_counters"] = of_keys
        return [found.get(name) for name in INPUTS]


def of_block(block: Block, fast: bool = False) -> KernelInputs:
    """The inputs of a block's kernels; `fast` allows the approximate instructions of NVIDIA GPUs."""
    rule = block.rule
    batch, q_length, heads, head_dim = block.q.shape
    kv_length, kv_heads, value_dim = block.kv_length, block.kv_heads, block.value_dim
    k, v = block.kv if isinstance(block.kv, tuple) else (block.kv, block.kv)
    positions = (
        rule.causal or rule.sliding_window is not None or rule.chunk_size is not None or block.slopes is not None
    )
    masked = bool(rule.masks) or block.mask is not None
    mask_words, mask_of_head = mask_bits.of_block(block) if masked else (None, None)
    left, right = (None, None) if rule.sliding_window is None else rule.sliding_window
    bias, slopes = block.bias, block.slopes
    capped = rule.logits_soft_cap is not None
    factor = rule.logits_soft_cap if rule.logits_soft_cap is not None else rule.softmax_scale
    plain = bias is None and slopes is None and factor > 0
    narrow = block.q.dtype != jnp.float32
    arrays = {
        "q": block.q,
        "k": k,
        "v": v,
        "q_positions": block.q_positions if positions else None,
        "kv_positions": block.kv_positions if positions else None,
        "q_index": block.q_index if rule.dropout_prob else None,
        "kv_index": block.kv_index if rule.dropout_prob or block.padded else None,
        "q_segments": block.q_segments,
        "kv_segments": block.kv_segments,
        "bias": bias,
        "slopes": slopes,
        "mask_words": mask_words,
        "mask_of_head": mask_of_head,
        "dropout_keys": dropout.keys(block) if rule.dropout_prob else None,
    }
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
        wide=max(kv_length * kv_heads * max(k.shape[-1], v.shape[-1]), q_length * heads * max(head_dim, value_dim))
        >= _INT32,
        wide_scores=q_length * kv_length >= _INT32,
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
        positions=positions,
        below=left is not None or rule.chunk_size is not None,
        above=rule.causal or right is not None or rule.chunk_size is not None,
        causal=rule.causal,
        left=left,
        right=right,
        chunk=rule.chunk_size,
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
        masks=mask_words is not None,
        one_mask=mask_of_head is None,
        mask_batch=_stride(mask_words, 0),
        mask_head=_stride(mask_words, 1),
        mask_query=-(-kv_length // mask_bits.BITS),
    )
    return KernelInputs(arrays, constants)


def _first_counters(index: Int32[Array, "b S"], tile: int) -> Int32[Array, "b tiles"]:
    """The dropout counter of each tile's first token: half its index, or -1 if its tokens cannot share draws.

    They can if the indices of the tile are consecutive and begin at a multiple of 16 (`kernels.dropout`). Indices
    increase, so the first and the last one tell. A tile that ends with padding, of index -1, is not consecutive.
    """
    more = -index.shape[1] % tile
    # The padding of the last tile continues its indices.
    following = index[:, -1:] + jnp.arange(1, more + 1, dtype=index.dtype)[None]
    filled = jnp.concatenate([index, following], 1) if more else index
    of_tile = filled.reshape(index.shape[0], -1, tile)
    first = of_tile[:, :, 0]
    consecutive = of_tile[:, :, -1] - first == tile - 1
    return jnp.where(consecutive & (first >= 0) & (first % 16 == 0), first // 2, -1)


def padded_dim(size: int) -> int:
    """The power of two, 16 or more, in which a kernel holds vectors of this size."""
    return max(16, power_of_two(size))


def power_of_two(size: int) -> int:
    """The least power of two that is not smaller."""
    return 1 << (size - 1).bit_length()


def _stride(x: jax.Array | None, axis: int) -> int:
    return 0 if x is None or x.shape[axis] == 1 else math.prod(x.shape[axis + 1 :])


def _precision(asked: str | None, narrow: bool, fast: bool) -> str:
    """The `input_precision` of `tl.dot` for the precision that the caller `asked` for. `narrow`: inputs of 16 bits.

    Products of 16-bit numbers are exact in any case. If `fast`, exact products of float32 numbers are three TF32
    products each (`tf32x3`), which are as exact as float32 sums and run on tensor cores.
    """
    if narrow:
        return "ieee"
    exact = "tf32x3" if fast else "ieee"
    return {None: exact, "default": "tf32", "high": "tf32x3"}.get(asked, "ieee")
