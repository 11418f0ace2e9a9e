# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""Which probabilities of a tile dropout keeps: the bits of `ringattn_core.contract.dropout`.

Entries `(i, j)`, `(i, j + 8)`, `(i + 8, j)` and `(i + 8, j + 8)` share a draw. A thread of a tensor core holds all four
in its part of a product, whichever axis the keys are, so threads exchange nothing.
"""

import triton
import triton.language as tl

from .tokens import unsigned

MULTIPLIER: tl.constexpr = tl.constexpr(0xD256D193)
WEYL: tl.constexpr = tl.constexpr(0x9E3779B9)


@triton.jit
def weights(
    queries, keys, head, KEPT: tl.constexpr, F: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr,
    BY_KEYS: tl.constexpr,
):  # fmt: skip
    """`KEPT` for each entry of a tile that survives, else zero.

    Four entries share a draw where the indices of both sides count on from multiples of 16. Whether they do is data (a
    striped shard skips), so both ways are compiled.
    """
    found = tl.zeros([KV_TILE, Q_TILE] if BY_KEYS else [Q_TILE, KV_TILE], tl.float32)
    if (queries.counter >= 0) & (keys.counter >= 0):
        found = _in_fours(queries, keys, head, KEPT, F, Q_TILE, KV_TILE, BY_KEYS)
    else:
        found = _one_by_one(queries, keys, head, KEPT, F)
    return found


@triton.jit
def _in_fours(
    queries, keys, head, KEPT: tl.constexpr, F: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr,
    BY_KEYS: tl.constexpr,
):  # fmt: skip
    """The weights where four entries share a draw."""
    ROWS: tl.constexpr = KV_TILE if BY_KEYS else Q_TILE
    COLUMNS: tl.constexpr = Q_TILE if BY_KEYS else KV_TILE
    in_rows = tl.arange(0, ROWS // 2)[:, None]
    in_columns = tl.arange(0, COLUMNS // 2)[None, :]
    if BY_KEYS:
        first, second = philox(queries.counter + in_columns, keys.counter + in_rows, head.dropout_key, F)
    else:
        first, second = philox(queries.counter + in_rows, keys.counter + in_columns, head.dropout_key, F)
    # The words are for queries 8 apart, their halves for keys 8 apart.
    in_first = tl.join(_weight(first & 0xFFFF, KEPT, F), _weight(first >> 16, KEPT, F))
    in_second = tl.join(_weight(second & 0xFFFF, KEPT, F), _weight(second >> 16, KEPT, F))
    four = tl.reshape(tl.join(in_first, in_second), (ROWS // 16, 8, COLUMNS // 16, 8, 2, 2))
    KEYS: tl.constexpr = 4 if BY_KEYS else 5
    return tl.reshape(tl.permute(four, (0, KEYS, 1, 2, 9 - KEYS, 3)), (ROWS, COLUMNS))


@triton.jit
def _one_by_one(queries, keys, head, KEPT: tl.constexpr, F: tl.constexpr):
    """The weights where each entry draws for itself."""
    return _weight(half_of(unsigned(queries.index), unsigned(keys.index), head.dropout_key, F), KEPT, F)


@triton.jit
def half_of(i, j, key, F: tl.constexpr):
    """The 16 bits of entry `(i, j)`, for broadcastable indices."""
    first, second = philox(_counter(i), _counter(j), key, F)
    word = tl.where((i & 8) == 0, first, second)
    return tl.where((j & 8) == 0, word & 0xFFFF, word >> 16)


@triton.jit
def _weight(half, KEPT: tl.constexpr, F: tl.constexpr):
    return tl.where(half >= F.threshold, KEPT, 0.0)


@triton.jit
def _counter(index):
    return (index >> 4) * 8 + (index & 7)


@triton.jit
def philox(a, b, key, F: tl.constexpr):
    """The two words of Philox 2x32-7 for the counter `(a, b)` under a key of uint32."""
    a = a.to(tl.uint32)
    b = b.to(tl.uint32)
    for _ in tl.static_range(7):
        high, low = _product(a, MULTIPLIER, F)
        a = high ^ key ^ b
        b = low
        key = key + WEYL
    return a, b


@triton.jit
def _product(x, FACTOR: tl.constexpr, F: tl.constexpr):
    """The high and the low word of a product.

    On NVIDIA one instruction: LLVM would multiply in 64 bits, because it does not know that the high halves are zero.
    """
    if F.fast:
        return tl.inline_asm_elementwise(
            "{.reg .b64 product; mul.wide.u32 product, $2, $3; mov.b64 {$1, $0}, product;}", "=r,=r,r,r",
            [x, FACTOR], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        product = x.to(tl.uint64) * FACTOR
        return (product >> 32).to(tl.uint32), product.to(tl.uint32)
