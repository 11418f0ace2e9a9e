# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""Which probabilities of a tile dropout keeps, by the same random bits as `ringattn_core.contract.dropout`.

The entries of query `i` and key `j`, `(i, j)`, `(i, j + 8)`, `(i + 8, j)` and `(i + 8, j + 8)`, share a draw: the two
words of one Philox call. One thread holds all four entries in the result of a product on tensor cores, whether rows are
queries or keys, so threads exchange nothing.
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
    """The dropout factor of each entry of a tile: `KEPT` where dropout keeps the entry, else 0.

    Entries share draws if the indices of the tile's queries and keys are consecutive and begin at multiples of 16. In a
    striped shard the indices are not consecutive. This is known only at run time, so both cases are compiled.
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
    """`weights` for a tile in which every four entries share a draw."""
    ROWS: tl.constexpr = KV_TILE if BY_KEYS else Q_TILE
    COLUMNS: tl.constexpr = Q_TILE if BY_KEYS else KV_TILE
    in_rows = tl.arange(0, ROWS // 2)[:, None]
    in_columns = tl.arange(0, COLUMNS // 2)[None, :]
    if BY_KEYS:
        first, second = philox(queries.counter + in_columns, keys.counter + in_rows, head.dropout_key, F)
    else:
        first, second = philox(queries.counter + in_rows, keys.counter + in_columns, head.dropout_key, F)
    # The first word is for query i, the second for i + 8; low halves are for key j, high halves for j + 8.
    in_first = tl.join(_weight(first & 0xFFFF, KEPT, F), _weight(first >> 16, KEPT, F))
    in_second = tl.join(_weight(second & 0xFFFF, KEPT, F), _weight(second >> 16, KEPT, F))
    four = tl.reshape(tl.join(in_first, in_second), (ROWS // 16, 8, COLUMNS // 16, 8, 2, 2))
    KEYS: tl.constexpr = 4 if BY_KEYS else 5
    return tl.reshape(tl.permute(four, (0, KEYS, 1, 2, 9 - KEYS, 3)), (ROWS, COLUMNS))


@triton.jit
def _one_by_one(queries, keys, head, KEPT: tl.constexpr, F: tl.constexpr):
    """`weights` for a tile in which each entry has a draw of its own."""
    return _weight(half_of(unsigned(queries.index), unsigned(keys.index), head.dropout_key, F), KEPT, F)


@triton.jit
def half_of(i, j, key, F: tl.constexpr):
    """The 16 random bits of entry `(i, j)` under the Philox key `key`; `i` and `j` are uint32 indices and broadcast."""
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
    """The two random words of Philox 2x32-7 for the counter `(a, b)` and the uint32 `key`."""
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
    """The high and the low word of the 64-bit product of the uint32 `x` and `FACTOR`.

    On NVIDIA GPUs this is one inline instruction: LLVM would multiply two 64-bit numbers, because it does not know that
    their high halves are 0.
    """
    if F.fast:
        return tl.inline_asm_elementwise(
            "{.reg .b64 product; mul.wide.u32 product, $2, $3; mov.b64 {$1, $0}, product;}", "=r,=r,r,r",
            [x, FACTOR], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        product = x.to(tl.uint64) * FACTOR
        return (product >> 32).to(tl.uint32), product.to(tl.uint32)
