# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportOperatorIssue=false
"""Sums the gradient of a tile of the bias over all heads, batch rows and queries that share the bias.

Each program owns its sums, so the order of additions is fixed. `keep_tile` stores a tile of `ds` in groups of eight
keys, one group after the other, each with all queries. Threads hold the result of a product in this order, so that a
warp writes one contiguous piece at a time.
"""

import triton
import triton.language as tl


@triton.jit
def bias_sums(
    DS, SEEN, FIRST, BEFORE, DBIAS,
    S: tl.constexpr, ROWS: tl.constexpr, GROUPED: tl.constexpr, HEADS: tl.constexpr, OWN_ROWS: tl.constexpr,
    BATCH_SUMS: tl.constexpr, HEAD_SUMS: tl.constexpr, ROW_SUMS: tl.constexpr, SUMMED_ROWS: tl.constexpr,
    FRESH: tl.constexpr, Q_LENGTH: tl.constexpr, KV_LENGTH: tl.constexpr, Q_TILE: tl.constexpr, KV_TILE: tl.constexpr,
    BY_KEYS: tl.constexpr,
):  # fmt: skip
    """Adds one strip of `DS`, the gradients of scores, to `DBIAS [b, n, t, S]`, the gradient of the bias.

    A strip is a range of tiles of queries, or of keys if `BY_KEYS`: its own tiles. `S` is its `bias_gradient.Strips`,
    and `FIRST` the number of its first own tile. Rows of `DS` and `SEEN` are own tiles, columns tiles of the other
    side. `SEEN [g, rows, columns]` says which tiles are visible; in the others `DS` is undefined. `BEFORE` has the sums
    over the earlier strips, in the memory of `DBIAS`; `FRESH`: there are none. `GROUPED`: batch rows differ in `SEEN`.

    Each tile of `DBIAS` in the strip has a program; if the bias has one row for all queries (`SUMMED_ROWS`), each tile
    of keys has one. The program sums `BATCH_SUMS` batch rows, `HEAD_SUMS` heads and `ROW_SUMS` own tiles. The bias has
    `HEADS` heads, and `OWN_ROWS` own tiles in a strip; the whole block has `ROWS` own tiles. A tile of `DS` is stored
    by `keep_tile`, or if `BY_KEYS` by `hopper.backward_kernel`, as `[KV_TILE, Q_TILE]`.
    """
    program = tl.program_id(0)
    column = program % S.columns
    rest = program // S.columns
    own = rest % OWN_ROWS
    of_bias = rest // OWN_ROWS
    bias_head = of_bias % HEADS
    bias_batch = of_bias // HEADS
    first = tl.load(FIRST)
    in_tile = tl.arange(0, Q_TILE * KV_TILE)
    total = tl.zeros([Q_TILE * KV_TILE], tl.float32)
    for turn in range(BATCH_SUMS * ROW_SUMS):
        row = own + turn % ROW_SUMS
        batch = bias_batch + turn // ROW_SUMS
        group = batch
        if not GROUPED:
            group = batch * 0
        # The last strip may have fewer tiles than the others.
        seen = SEEN + ((group * ROWS + first + row) * S.columns + column)
        if tl.load(seen, mask=first + row < ROWS, other=0) != 0:
            for member in range(HEAD_SUMS):
                tile = ((batch * S.heads + bias_head + member) * S.rows + row) * S.columns + column
                total += tl.load(DS + tile.to(tl.int64) * (Q_TILE * KV_TILE) + in_tile).to(tl.float32)

    if BY_KEYS:
        total = tl.permute(tl.reshape(total, (KV_TILE, Q_TILE)), (1, 0))
        q_tile, kv_tile = column, first + own
    else:
        total = tl.reshape(tl.permute(tl.reshape(total, (KV_TILE // 8, Q_TILE, 8)), (1, 0, 2)), (Q_TILE, KV_TILE))
        q_tile, kv_tile = first + own, column
    columns = kv_tile * KV_TILE + tl.arange(0, KV_TILE)
    inside = columns < KV_LENGTH
    if SUMMED_ROWS:
        at = of_bias.to(tl.int64) * KV_LENGTH + columns
        found = tl.sum(total, 0)
        if not FRESH:
            found += tl.load(BEFORE + at, mask=inside, other=0.0)
        tl.store(DBIAS + at, found, mask=inside)
    else:
        rows = q_tile * Q_TILE + tl.arange(0, Q_TILE)
        at = (of_bias.to(tl.int64) * Q_LENGTH + rows.to(tl.int64)[:, None]) * KV_LENGTH + columns[None, :]
        tl.store(DBIAS + at, total, mask=(rows < Q_LENGTH)[:, None] & inside[None, :])


@triton.jit
def keep_tile(at, ds, F: tl.constexpr):
    """Stores a tile of `ds`, the gradients of scores, at pointer `at`, in the order in which `bias_sums` reads it."""
    Q_TILE: tl.constexpr = ds.shape[0]
    KV_TILE: tl.constexpr = ds.shape[1]
    kept = ds.to(at.dtype.element_ty)
    columns = tl.arange(0, KV_TILE)
    places = (columns // 8 * (Q_TILE * 8) + columns % 8)[None, :] + tl.arange(0, Q_TILE)[:, None] * 8
    if F.fast:
        # A product leaves two neighbouring elements in each thread, which stores them as one word. For `tl.store` the
        # compiler would first exchange elements between threads, and all threads would wait for the exchange.
        first, second = tl.split(tl.reshape(kept, (Q_TILE, KV_TILE // 2, 2)))
        at_first, _ = tl.split(tl.reshape(places, (Q_TILE, KV_TILE // 2, 2)))
        words = _bits(first) | (_bits(second) << 16)
        tl.inline_asm_elementwise(
            "st.global.b32 [$1], $2; mov.b32 $0, $2;", "=r,l,r", [at + at_first, words],
            dtype=tl.uint32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        tl.store(at + places, kept)


@triton.jit
def _bits(x):
    return x.to(tl.uint16, bitcast=True).to(tl.uint32)
