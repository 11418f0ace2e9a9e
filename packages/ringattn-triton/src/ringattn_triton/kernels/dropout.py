# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""Which probabilities of a tile are dropped, as `ringattn_core.contract.dropout` says, and what the others weigh."""

import triton
import triton.language as tl

from .orientation import as_keys, unsigned
from .writing import written

MULTIPLIER_A: tl.constexpr = tl.constexpr(0xD2511F53)
MULTIPLIER_C: tl.constexpr = tl.constexpr(0xCD9E8D57)
WEYL_A: tl.constexpr = tl.constexpr(0x9E3779B9)
WEYL_C: tl.constexpr = tl.constexpr(0xBB67AE85)


@triton.jit
def weights(queries, keys, head, KEPT: tl.constexpr, F: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr):
    """`KEPT` for each probability of a tile that survives, else zero: queries are rows, keys are `dealt`.

    Four keys share one call of Philox where their indices are consecutive and begin at a multiple of four. Whether
    they do is data (a striped shard skips), so both ways are compiled.
    """
    if keys.group >= 0:
        a, b, c, d = _of_groups(queries, keys, head, F, tl.arange(0, KV_TILE // 4)[None, :])
    else:
        a, b, c, d = _one_by_one(queries, keys, head, F, KV_TILE, False)
    lower = tl.join(_weighed(a, KEPT, F, Q_TILE, KV_TILE), _weighed(b, KEPT, F, Q_TILE, KV_TILE))
    upper = tl.join(_weighed(c, KEPT, F, Q_TILE, KV_TILE), _weighed(d, KEPT, F, Q_TILE, KV_TILE))
    return tl.reshape(tl.permute(tl.join(lower, upper), (0, 1, 4, 2, 3)), (Q_TILE, KV_TILE))


@triton.jit
def _weighed(word, KEPT: tl.constexpr, F: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr):
    weight = tl.where(word >= F.threshold, KEPT, 0.0)
    return tl.reshape(weight, (Q_TILE, KV_TILE // 16, 4))


@triton.jit
def keep_bits(at, keep, product, F: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr):
    """Writes what survives of a tile for `weights_from_bits`: bytes `[S / 32, T, 4]`, two groups of four keys in each.

    Those two are groups that one thread has, 16 keys apart: it writes what it has drawn, and passes nothing on. `keep`
    are `weights`, and `product` is any product of the tile.
    """
    bits = tl.where(keep != 0.0, 1, 0)
    if F.fast:
        # Beside a product the bits lie as it does. By themselves they would be drawn a second time, by other threads.
        bits = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;",
            "=r,r,r",
            [bits, product.to(tl.int32, bitcast=True)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    bits = tl.permute(tl.reshape(bits, (Q_TILE, KV_TILE // 32, 2, 2, 4, 2)), (0, 1, 4, 2, 3, 5))
    first, second = tl.split(bits)
    lower, upper = tl.split(first | (second << 1))
    low, high = tl.split(lower | (upper << 2))
    of_32 = tl.arange(0, KV_TILE // 32)[None, :, None] * F.kept_line
    places = of_32 + (tl.arange(0, Q_TILE)[:, None, None] * 4 + tl.arange(0, 4)[None, None, :])
    written(at + places, low | (high << 4), F)


@triton.jit
def weights_from_bits(at, F: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr):
    """`F.keep_weight` for each probability that `keep_bits` has said survives, else zero; keys are rows."""
    of_32 = tl.arange(0, KV_TILE // 32)[:, None, None] * F.kept_line
    found = tl.load(at + (of_32 + (tl.arange(0, Q_TILE)[None, :, None] * 4 + tl.arange(0, 4)[None, None, :])))
    groups = tl.permute(found.to(tl.int32), (0, 2, 1))
    both = groups[:, None, :, :] >> (4 * tl.arange(0, 2))[None, :, None, None]
    return _weighed_by_keys(tl.reshape(both, (KV_TILE // 4, Q_TILE)), F, Q_TILE, KV_TILE)


@triton.jit
def weights_by_keys(queries, keys, head, F: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr):
    """`weights` with keys as rows, and `F.keep_weight` for those that survive.

    No thread holds four keys of a group there: threads pass each other four bits.
    """
    groups = tl.arange(0, KV_TILE // 4)
    bits = tl.zeros((KV_TILE // 4, Q_TILE), tl.int32)
    if keys.group >= 0:
        turn = 0
        # In a loop, if only of one turn, the compiler leaves the draws to the threads that it spread them over. It
        # would have each thread draw all that it needs, which is what others need too.
        while turn < 1:
            a, b, c, d = _of_groups(queries, keys, head, F, groups[:, None])
            bits = _packed(a, b, c, d, F)
            turn += 1
    else:
        a, b, c, d = _one_by_one(queries, keys, head, F, KV_TILE, True)
        bits = _packed(a, b, c, d, F)
    return _weighed_by_keys(bits, F, Q_TILE, KV_TILE)


@triton.jit
def _weighed_by_keys(bits, F: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr):
    """`F.keep_weight` or zero for each key, which are `dealt`, from four bits for each four in a row."""
    bits = tl.reshape(bits, (KV_TILE // 16, 4, Q_TILE))
    pairs = bits[:, :, None, :] >> (2 * tl.arange(0, 2))[None, None, :, None]
    first = tl.reshape(tl.where((pairs & 1) != 0, F.keep_weight, 0.0), (KV_TILE // 16, 8, Q_TILE))
    second = tl.reshape(tl.where((pairs & 2) != 0, F.keep_weight, 0.0), (KV_TILE // 16, 8, Q_TILE))
    return tl.reshape(tl.permute(tl.join(first, second), (0, 3, 1, 2)), (KV_TILE, Q_TILE))


@triton.jit
def _packed(a, b, c, d, F: tl.constexpr):
    """For each word a bit that says whether its key is kept."""
    low = tl.where(a >= F.threshold, 1, 0) | tl.where(b >= F.threshold, 2, 0)
    high = tl.where(c >= F.threshold, 4, 0) | tl.where(d >= F.threshold, 8, 0)
    return low | high


@triton.jit
def _of_groups(queries, keys, head, F: tl.constexpr, groups):
    """Four random words for each query and each four keys in a row, whose indices begin at a multiple of four."""
    counter = unsigned(keys.group + groups)
    return philox(counter, unsigned(queries.index), head.head_index, head.batch_index, head.seed, F)


@triton.jit
def _one_by_one(queries, keys, head, F: tl.constexpr, KV_TILE: tl.constexpr, BY_KEYS: tl.constexpr):
    """The same for keys of any index: each draws four words for the one that is its own."""
    groups = tl.arange(0, KV_TILE // 4)
    query = unsigned(queries.index)
    a = unsigned(as_keys(groups, BY_KEYS)) + query
    b = a
    c = a
    d = a
    for part in tl.range(0, 4):
        column = groups * 4 + part
        if F.kv_length % KV_TILE != 0:
            column = tl.minimum(column, F.kv_length - 1 - keys.start)
        index = unsigned(as_keys(tl.load(keys.indices + column), BY_KEYS))
        first, second, third, fourth = philox(index >> 2, query, head.head_index, head.batch_index, head.seed, F)
        which = index & 3
        low = tl.where(which == 0, first, second)
        high = tl.where(which == 2, third, fourth)
        word = tl.where(which < 2, low, high)
        a = tl.where(part == 0, word, a)
        b = tl.where(part == 1, word, b)
        c = tl.where(part == 2, word, c)
        d = tl.where(part == 3, word, d)
    return a, b, c, d


@triton.jit
def dealt(SIZE: tl.constexpr, BY_KEYS: tl.constexpr):
    """Which of `SIZE` keys lies in each column, or row, of a tile: such that few threads draw for each four.

    Of 16 columns of a product, a thread of a tensor core holds 0, 1, 8 and 9, or 2, 3, 10 and 11, and so on; of 16
    rows, 0 and 8, or 1 and 9, and so on.
    """
    at = tl.arange(0, SIZE)
    if BY_KEYS:
        return at // 16 * 16 + at % 8 * 2 + at // 8 % 2
    else:
        return at // 16 * 16 + at // 2 % 4 * 4 + at // 8 % 2 * 2 + at % 2


@triton.jit
def philox(a, b, c, d, seed, F: tl.constexpr):
    """Philox 4x32-10 of the counter `(a, b, c, d)` under the key `(seed, 0)`; all of uint32.

    They broadcast only when they meet: the first two rounds are done on rows, columns and numbers.
    """
    first = seed
    second = seed * 0
    for _ in tl.static_range(10):
        high_a, low_a = _product(a, MULTIPLIER_A, F)
        high_c, low_c = _product(c, MULTIPLIER_C, F)
        a = high_c ^ b ^ first
        b = low_c
        c = high_a ^ d ^ second
        d = low_a
        first = first + WEYL_A
        second = second + WEYL_C
    return a, b, c, d


@triton.jit
def _product(x, FACTOR: tl.constexpr, F: tl.constexpr):
    """The high and the low word of a product.

    LLVM would carry the words on in 64 bits, and multiply them as such: on NVIDIA it is not shown what they are.
    """
    if F.fast:
        return tl.inline_asm_elementwise(
            "{.reg .b64 product; mul.wide.u32 product, $2, $3; mov.b64 {$1, $0}, product;}", "=r,=r,r,r",
            [x, FACTOR], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        product = x.to(tl.uint64) * FACTOR
        return (product >> 32).to(tl.uint32), product.to(tl.uint32)
