# SPDX-License-Identifier: Apache-2.0
"""What of a block the kernels read: the arrays in the order of their parameters, and what is fixed when they compile.

Nothing is copied or transposed: shapes and strides are compiled in, an axis of length 1 has stride 0, and an array that
the rule does not ask for is `None` and never read.
"""

import dataclasses
import math
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32
from ringattn_core.contract import dropout
from ringattn_core.contract.protocol import Block, Own, Partial

from . import packing, words

LOG2_E: Final = math.log2(math.e)
_NO_LIMIT: Final = 2**31 - 1
_INT32: Final = 2**31
WORTH_TURNING: Final = 4
"""How many heads, of all batch rows, share a bias that is turned for them."""

INPUTS: Final = (
    "q", "kv", "q_positions", "kv_positions", "q_index", "kv_index", "kv_groups", "q_segments", "kv_segments", "bias",
    "slopes", "mask_words", "mask_of_head", "dense_words", "seed", "batch_index", "head_index", "own_k", "own_v",
    "found",
)  # fmt: skip
"""The parameters that every kernel begins with, in this order."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """What a kernel is compiled for. A field `x_batch` (`_head`, `_query`) is how far `x` moves per batch row (...).

    `plain` says that a score is nothing but a positive number times the product, or times the bent product, so that
    maxima may be taken of those; else `unbend` makes it a score. `fold` is what turns what `scored` gives into units of
    log2.
    `own` says that keys and values may be read as they came (`kernels.packing.sources`).
    `drawn` says that what dropout keeps is drawn; else it is read.
    `below` and `above` say that a query sees no key before, or behind, some position.
    """

    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    kv_batch: int
    kv_token: int
    kv_head: int
    value_at: int
    own: bool
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
    bounded_left: bool
    left: int
    bounded_right: bool
    right: int
    chunked: bool
    chunk: int
    segments: bool
    padded: bool
    dropout: bool
    drawn: bool
    kept_head: int
    kept_line: int
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
    mask_words_batch: int
    mask_words_head: int
    one_mask: bool
    dense: bool
    dense_words_batch: int
    dense_words_head: int
    words_query: int

    @property
    def group(self) -> int:
        """How many query heads read one key head."""
        return self.heads // self.kv_heads


class Operands(NamedTuple):
    """A block as kernels take it: `arrays` in the order of `INPUTS`, but for what depends on the tiles."""

    arrays: tuple[jax.Array | None, ...]
    facts: Facts

    def named(self, name: str) -> jax.Array | None:
        return self.arrays[INPUTS.index(name)]

    def mended(self, own: Own | None, poison: bool) -> "Operands":
        """The same for a kernel that reads K and V where they are, or packed if a look at them found anything.

        Keys that are bad are NaN then if `poison`, else zero.
        """
        if own is None or not self.facts.own:
            return self
        return self.replaced(kv=packing.if_bad(own, poison), found=own.found)

    def packed(self) -> "Operands":
        """The same for a kernel that reads K and V packed alone."""
        read = self.replaced(own_k=None, own_v=None, found=None)
        return read._replace(facts=dataclasses.replace(self.facts, own=False))

    def replaced(self, **arrays: jax.Array | None) -> "Operands":
        """With these arrays in the places of those of their names."""
        return self._replace(arrays=tuple(arrays.get(name, x) for name, x in zip(INPUTS, self.arrays, strict=True)))

    def turned(self) -> "Operands":
        """The same with a bias whose queries lie side by side, for a kernel whose scores have keys as rows.

        Not where hardly any heads and batch rows share it, or all queries do: to turn it costs as much as it saves.
        """
        q, bias, facts = self.arrays[0], self.named("bias"), self.facts
        assert q is not None
        if bias is None or not facts.bias_query:
            return self
        if q.shape[0] * facts.heads < WORTH_TURNING * bias.shape[0] * bias.shape[1]:
            return self
        changed = dataclasses.replace(facts, bias_query=1, bias_key=facts.q_length)
        return self.replaced(bias=jnp.swapaxes(bias, 2, 3))._replace(facts=changed)

    def tiled(self, kv_tile: int) -> list[jax.Array | None]:
        """The arrays for a kernel with tiles of so many keys."""
        arrays = list(self.arrays)
        if self.facts.drawn:
            index = self.named("kv_index")
            assert index is not None
            arrays[INPUTS.index("kv_groups")] = _groups(index, kv_tile)
        return arrays


def of(block: Block, fast: bool = False) -> Operands:
    """The block as operands; `fast` allows approximations of the device that an interpreter lacks.

    Where K and V are there as they came they are not packed yet: see `Operands.mended`.
    """
    rule = block.rule
    batch, q_length, heads, head_dim = block.q.shape
    kv_length, kv_heads, value_dim = block.kv_length, block.kv.shape[-2], block.value_dim
    width = block.kv.shape[-1]
    positions = rule.causal or rule.window is not None or rule.chunk is not None or block.slopes is not None
    own = block.own if block.own is not None and block.own.k.shape == block.own.v.shape else None
    uses_index = bool(rule.dropout)
    mask_words, mask_of_head = words.of_rule(block) if rule.masks else (None, None)
    dense_words = words.of_dense(block) if block.mask is not None else None
    left, right = (None, None) if rule.window is None else rule.window
    bias, slopes = block.bias, block.slopes
    capped = rule.soft_cap is not None
    factor = rule.soft_cap if rule.soft_cap is not None else rule.scale
    plain = bias is None and slopes is None and factor > 0
    narrow = block.q.dtype != jnp.float32
    words_query = -(-kv_length // words.BITS)
    arrays: dict[str, Any] = {
        "q": block.q,
        "kv": block.kv if own is None else None,
        "q_positions": block.q_positions if positions else None,
        "kv_positions": block.kv_positions if positions else None,
        "q_index": block.q_index if uses_index else None,
        "kv_index": block.kv_index if uses_index or block.padded else None,
        "kv_groups": None,
        "q_segments": block.q_segments,
        "kv_segments": block.kv_segments,
        "bias": bias,
        "slopes": slopes,
        "mask_words": mask_words,
        "mask_of_head": mask_of_head,
        "dense_words": dense_words,
        "seed": block.seed if rule.dropout else None,
        "batch_index": block.batch_index if rule.dropout else None,
        "head_index": block.head_index if rule.dropout else None,
        "own_k": None if own is None else own.k,
        "own_v": None if own is None else own.v,
        "found": None,
    }
    facts = Facts(
        q_length=q_length,
        kv_length=kv_length,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        kv_batch=kv_length * kv_heads * width,
        kv_token=kv_heads * width,
        kv_head=width,
        value_at=batch * kv_length * kv_heads * width if block.kv.ndim == 5 else head_dim,
        own=own is not None,
        wide=max(kv_length * kv_heads * width, q_length * heads * max(head_dim, value_dim)) >= _INT32,
        wide_scores=q_length * kv_length >= _INT32,
        q_positions_batch=_stride(block.q_positions, 0),
        kv_positions_batch=_stride(block.kv_positions, 0),
        q_index_batch=_stride(block.q_index, 0),
        kv_index_batch=_stride(block.kv_index, 0),
        scale=rule.scale,
        plain=plain,
        fold=factor * LOG2_E if plain else LOG2_E,
        precision=_precision(rule.precision, narrow, fast),
        fast=fast and narrow,
        capped=capped,
        bend=rule.scale / factor if capped else 1.0,
        unbend=factor,
        positions=positions,
        below=left is not None or rule.chunk is not None,
        above=rule.causal or right is not None or rule.chunk is not None,
        causal=rule.causal,
        bounded_left=left is not None,
        left=min(left, _NO_LIMIT) if left is not None else 0,
        bounded_right=right is not None,
        right=min(right, _NO_LIMIT) if right is not None else 0,
        chunked=rule.chunk is not None,
        chunk=min(rule.chunk, _NO_LIMIT) if rule.chunk is not None else 0,
        segments=block.q_segments is not None,
        padded=block.padded,
        dropout=bool(rule.dropout),
        drawn=bool(rule.dropout),
        kept_head=0,
        kept_line=0,
        threshold=dropout.threshold(rule.dropout),
        keep_weight=1.0 / (1.0 - rule.dropout),
        bias=bias is not None,
        bias_batch=_stride(bias, 0),
        bias_head=_stride(bias, 1),
        bias_query=_stride(bias, 2),
        bias_key=1,
        slopes=slopes is not None,
        slopes_batch=_stride(slopes, 0),
        masks=mask_words is not None,
        mask_words_batch=_stride(mask_words, 0),
        mask_words_head=_stride(mask_words, 1),
        one_mask=mask_of_head is None,
        dense=dense_words is not None,
        dense_words_batch=_stride(dense_words, 0),
        dense_words_head=_stride(dense_words, 1),
        words_query=words_query,
    )
    return Operands(tuple(arrays[name] for name in INPUTS), facts)


def results(partial: Partial) -> list[jax.ShapeDtypeStruct]:
    """What a forward kernel writes: `out`, `lse`, and `rest`, or one element where none is asked for."""
    rest = jax.ShapeDtypeStruct((1,), partial.out.dtype) if partial.rest is None else partial.rest
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (partial.out, partial.lse, rest)]


def _groups(index: Int32[Array, "b S"], kv_tile: int) -> Int32[Array, "b tiles"]:
    """A fourth of each tile's first index, if all others count on from there and it is a multiple of four; or -1."""
    more = -index.shape[1] % kv_tile
    # What fills the last tile counts on from what is in it.
    filled = jnp.concatenate([index, index[:, -1:] + 1 + jnp.arange(more, dtype=index.dtype)], 1) if more else index
    of_tile = filled.reshape(index.shape[0], -1, kv_tile)
    first = of_tile[:, :, 0]
    counts_on = (of_tile == first[:, :, None] + jnp.arange(kv_tile, dtype=index.dtype)).all(2)
    return jnp.where(counts_on & (first >= 0) & (first % 4 == 0), first // 4, -1)


def padded_dim(size: int) -> int:
    """The power of two, 16 or more, in which a kernel holds vectors of this size."""
    return max(16, power_of_two(size))


def power_of_two(size: int) -> int:
    """The least that is not smaller."""
    return 1 << (size - 1).bit_length()


def _stride(x: jax.Array | None, axis: int) -> int:
    return 0 if x is None or x.shape[axis] == 1 else math.prod(x.shape[axis + 1 :])


def _precision(asked: str | None, narrow: bool, fast: bool) -> str:
    """What `tl.dot` calls it; products of narrow numbers are exact as they are.

    Three products of TF32 are as exact as sums in float32 are, and run on tensor cores where there are any.
    """
    if narrow:
        return "ieee"
    exact = "tf32x3" if fast else "ieee"
    return {None: exact, "default": "tf32", "high": "tf32x3"}.get(asked, "ieee")
