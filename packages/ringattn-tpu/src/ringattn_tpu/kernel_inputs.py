# SPDX-License-Identifier: Apache-2.0
"""What the kernels read of a block: arrays with heads before tokens, and the settings that they are compiled for."""

import dataclasses
import functools
import math
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int32
from ringattn_core.contract import dropout
from ringattn_core.contract.protocol import Block
from ringattn_core.contract.rule import Rule

from . import mask_bits
from .block_sizes import LANES, Sizes
from .launch import At, Grid, Operand, generation, launch
from .steps import Steps

LOG2_E: Final = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Settings:
    """What a kernel is compiled for.

    `q_rows` and `kv_rows` name the integers that the kernel reads for each query and each key: `first` and `last` (the
    positions of the first and the last key that a query sees), or `first` and `span` if both are bounded (`span` is
    `last - first`), `position`, `index` and `segment`.
    """

    rule: Rule
    q_rows: tuple[str, ...]
    kv_rows: tuple[str, ...]
    grain: int
    """The keys of a bit of `mask_words`."""
    precision: str | None
    """The precision of float32 products: exact unless the caller asks for less. bfloat16 products are always exact."""

    @property
    def product_scale(self) -> float:
        """The factor of each product of query and key: scale / soft cap; without a cap, the scale in units of log2."""
        cap = self.rule.logits_soft_cap
        return self.rule.softmax_scale * LOG2_E if cap is None else self.rule.softmax_scale / cap


class KernelInputs(NamedTuple):
    """A block, padded to whole tiles, and the arrays that every kernel reads, each with a letter for each axis.

    `B` is batch rows, `N` and `K` are query and key heads, `M` is the sets of mask bits that `Block.bits_of_head` gives
    to query heads, `T` and `S` are query and key tokens. A digit is an axis along which only the element with this
    number is read, and `.` an axis that every step reads whole. An axis of length 1 broadcasts.
    """

    block: Block
    settings: Settings
    sizes: Sizes
    arrays: dict[str, tuple[jax.Array, str]]

    @property
    def per_head_gradient(self) -> bool:
        """Whether kernels compute the gradient of a parameter of each head: the call has ALiBi slopes."""
        return self.block.slopes is not None

    def operands(self, by_keys: bool) -> dict[str, Operand]:
        """The arrays as inputs of a kernel that keeps tiles of queries, or of keys if `by_keys`."""
        found = {name: self.operand(x, axes, by_keys) for name, (x, axes) in self.arrays.items()}
        if self.block.bits is not None and self.block.grain > 1:
            sizes = self.sizes
            count, each = sizes.kv_length // sizes.kv_tile, sizes.kv_tile // self.block.grain
            words = mask_bits.of_tiles(self.block.bits, count, each)
            found["mask_words"] = self.operand(words, "BMS.T", by_keys)
        elif self.block.bits is not None:
            tile = self.sizes.kv_tile if by_keys else self.sizes.q_tile
            words = mask_bits.laid_out(self.block.bits, by_keys, tile)
            found["mask_bits"] = self.operand(words, "BMST" if by_keys else "BMTS", by_keys)
        return found

    def operand(self, x: Any, axes: str, by_keys: bool) -> Operand:
        """`x`, whose axes have the letters `axes`, as an input or output of a kernel.

        The heads of the grid are query heads, or key heads if `by_keys`. The query heads that read one key head are the
        members of its group.
        """
        group, sizes = self.block.group, self.sizes
        tokens = {"T": (sizes.q_tile, sizes.q_length), "S": (sizes.kv_tile, sizes.kv_length)}

        def length(axis: str, size: int) -> int | None:
            if axis in tokens:
                tile, whole = tokens[axis]
                return 1 if size == 1 else size * tile // whole
            return size if axis == "." else None

        def index(axis: str, size: int, at: At) -> Any:
            if axis.isdigit():
                return int(axis)
            if axis == "." or size == 1:
                return 0
            if axis == "K":
                return at.head if by_keys or group == 1 else jax.lax.div(at.head, np.int32(group))
            if axis in "NM":
                head = at.head * group + at.member if by_keys and group > 1 else at.head
                if axis == "N":
                    return head
                if at.bits_of_head is not None:
                    return at.bits_of_head[head]
                return jax.lax.div(head, np.int32(self.block.q.shape[2] // size))
            return at.batch if axis == "B" else at.own if (axis == "S") == by_keys else at.visiting

        named = list(zip(axes, x.shape, strict=True))
        return Operand(x, tuple(length(*one) for one in named), lambda at: tuple(index(*one, at) for one in named))

    def launch(
        self,
        kernel: Any,
        steps: Steps,
        grid: Grid,
        inputs: dict[str, Operand],
        outputs: dict[str, Operand],
        scratch: dict[str, Any],
        *,
        by_keys: bool,
        products: int,
        **options: Any,
    ) -> dict[str, jax.Array]:
        """Launches a kernel of this package and returns its outputs by name.

        The default parts are those for which libtpu 0.0.50.1 schedules the fewest bundles
        (`benchmarks/tpu_static.py`).

        The kernel computes `products` matrix products a step. `scratch` gets `columns`, room for the integers of the
        tile that the kernel keeps.
        """
        sizes, settings, block = self.sizes, self.settings, self.block
        own, visiting = (sizes.kv_tile, sizes.q_tile) if by_keys else (sizes.q_tile, sizes.kv_tile)
        if count := len(settings.kv_rows if by_keys else settings.q_rows):
            scratch = scratch | {"columns": pltpu.VMEM((count, own, LANES), jnp.int32)}
        part = sizes.part_of(visiting, default=256 if by_keys and generation() == 6 else 512)
        pairs = block.q.shape[0] * block.q.shape[2] * block.q_length * block.kv_length
        return launch(
            functools.partial(kernel, settings=settings, part=part, **options),
            steps,
            grid,
            inputs,
            outputs,
            scratch=scratch,
            # XLA reads this estimate to hide transfers behind the kernel. It counts all tiles, visible or not.
            cost=pl.CostEstimate(
                flops=products * pairs * (block.q.shape[-1] + block.value_dim),
                transcendentals=pairs,
                bytes_accessed=sum(x.size * x.dtype.itemsize for x, _ in self.arrays.values()),
            ),
            name=f"ringattn_{kernel.__name__}",
        )


def prepared(block: Block, sizes: Sizes) -> KernelInputs:
    """The block, padded to the lengths of `sizes`, as the kernels read it."""
    rule = block.rule
    block = mask_bits.with_grain(block.padded_to(sizes.q_length, sizes.kv_length), sizes.kv_tile)
    q_side, kv_side = _integers(block)
    settings = Settings(
        rule=rule,
        q_rows=tuple(q_side),
        kv_rows=tuple(kv_side),
        grain=block.grain,
        precision=(rule.precision or "highest") if block.q.dtype == jnp.float32 else None,
    )
    arrays = {"q": (jnp.swapaxes(block.q, 1, 2), "BNT.")}
    if not isinstance(block.kv, tuple) and block.kv.ndim == 5:
        kv = jnp.swapaxes(block.kv, 2, 3)
        arrays |= {"k": (kv, "0BKS."), "v": (kv, "1BKS.")}
    else:
        arrays |= {name: (jnp.swapaxes(x, 1, 2), "BKS.") for name, x in (("k", block.k), ("v", block.v))}
    for name, side, axes in (("q_integers", q_side, "BN.T"), ("kv_integers", kv_side, "B.S")):
        if side:
            arrays[name] = (_stacked(side), axes)
    if block.bias is not None:
        arrays["bias"] = (block.bias, "BNTS")
    if block.slopes is not None:
        arrays["distance_weight"] = (block.slopes[:, :, None, None] * LOG2_E, "BN..")
    if rule.dropout_prob:
        keys = jax.lax.bitcast_convert_type(dropout.keys(block), jnp.int32)
        arrays["dropout_key"] = (keys[:, :, None, None], "BN..")
    return KernelInputs(block, settings, sizes, arrays)


def _integers(block: Block) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """The integers of queries, `[b, n, T]`, and of keys, `[b, S]`, that some score depends on."""
    if block.first is not None and block.last is not None:
        q = {"first": block.first, "span": block.last - block.first}
    else:
        q = {name: x for name, x in (("first", block.first), ("last", block.last)) if x is not None}
    kv: dict[str, jax.Array] = {}
    if block.slopes is not None:
        q["position"] = block.q_positions
    if q:
        kv["position"] = block.kv_positions
    if block.rule.dropout_prob:
        q["index"], kv["index"] = block.q_index, block.kv_index
    if block.q_segments is not None or block.padded:
        # Negative ids are padding, which must equal nothing: one id for queries and another for keys.
        ids, kv_ids = block.q_segments, block.kv_segments
        ids = jnp.zeros_like(block.q_index) if ids is None else jnp.where(ids < 0, -1, ids)
        kv_ids = jnp.zeros_like(block.kv_index) if kv_ids is None else jnp.where(kv_ids < 0, -2, kv_ids)
        q["segment"], kv["segment"] = ids, jnp.where(block.kv_index < 0, -2, kv_ids)
    return {name: x if x.ndim == 3 else x[:, None] for name, x in q.items()}, kv


def _stacked(side: dict[str, jax.Array]) -> Int32[Array, "*batch rows tokens"]:
    return jnp.stack(jnp.broadcast_arrays(*side.values()), -2)
