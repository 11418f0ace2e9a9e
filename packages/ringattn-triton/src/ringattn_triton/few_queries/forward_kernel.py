# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
"""The forward kernel for few queries and many keys, as in decoding: programs share the keys of a head among them."""

import triton
import triton.language as tl

from ..kernels.scores import LOG2_E, Head, continued_rows, final_rows
from ..kernels.tile_loop import Visit, over_visited, vectors
from ..kernels.tokens import of_rows
from ..portable.forward_kernel import continued

SAMPLES: tl.constexpr = tl.constexpr(256)
"""At how many key tiles a program looks at a time to find those that it visits."""


@triton.jit
def forward(
    Q, K, V, P, LSE_BEFORE, OUT, LSE,
    F: tl.constexpr, T: tl.constexpr, FROM_LSE: tl.constexpr, SPLITS: tl.constexpr, SORTED: tl.constexpr,
    Q_TILE: tl.constexpr, KV_TILE: tl.constexpr, DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Writes `OUT [B * SPLITS, T, N, Hv]` and `LSE [B * SPLITS, N, T]`: a partial result of each part of the keys.

    The query heads of a key head share tiles of `Q_TILE` rows: the first `F.group` rows are the first query in each of
    these heads, the next are the second query, and so on. The key tiles that a tile of queries sees are cut into
    `SPLITS` equal parts, of which each program takes one; the parts of a row of the batch are neighbours in the
    results. `FROM_LSE`: the first part begins from sinks, with the log-sum-exp `LSE_BEFORE [B, N, T]`. `T` is a
    `visited_tiles.TableShape` without a list. `SORTED`: positions of keys do not decrease.
    """
    program = tl.program_id(0)
    # Heads are neighbours in memory, and so are the programs that read them.
    kv_head = program % F.kv_heads
    split = program // F.kv_heads % SPLITS
    own = program // (F.kv_heads * SPLITS) % T.rows
    batch = program // (F.kv_heads * SPLITS * T.rows)

    number = own * Q_TILE + tl.arange(0, Q_TILE)
    rows = number // F.group
    head_number = kv_head * F.group + number % F.group
    Q_RAGGED: tl.constexpr = F.q_length * F.group % Q_TILE != 0
    queries = of_rows(P, batch, head_number, rows, 0, F, Q_RAGGED, False)
    slope = 0.0
    if F.slopes:
        slope = tl.load(P.slopes + (batch * F.slopes_batch + head_number))[:, None]
    head = Head(head_number, 0, slope, 0, 0)

    dims = tl.arange(0, DIM)
    value_dims = tl.arange(0, VALUE_DIM)
    columns = tl.arange(0, KV_TILE)
    wide_batch = batch.to(tl.int64)
    DIM_RAGGED: tl.constexpr = F.head_dim != DIM
    q_row = wide_batch * F.q_length * F.heads * F.head_dim + (rows * F.heads + head_number) * F.head_dim
    q = vectors(
        Q + q_row[:, None] + dims[None, :], rows[:, None], dims[None, :], F.q_length, F.head_dim, Q_RAGGED, DIM_RAGGED
    )
    k_pointers = K + wide_batch * F.k_batch + kv_head * F.k_head + (columns[None, :] * F.k_token + dims[:, None])
    v_first = F.v_start + wide_batch * F.v_batch + kv_head * F.v_head
    v_pointers = V + v_first + (columns[:, None] * F.v_token + value_dims[None, :])

    visited = _part(_seen(P, batch, queries, F, KV_TILE, SORTED), split, SPLITS)
    acc = tl.zeros([Q_TILE, VALUE_DIM], tl.float32)
    top = tl.full([Q_TILE], -float("inf"), tl.float32)
    total = tl.zeros([Q_TILE], tl.float32)
    if FROM_LSE:
        lse_at = (wide_batch * F.heads + head_number) * F.q_length + rows
        top, total = continued_rows(
            tl.load(LSE_BEFORE + lse_at, mask=(rows < F.q_length) & (split == 0), other=-float("inf"))
        )
    given = (q, k_pointers, v_pointers, queries, head, P, batch)
    sums = over_visited(continued, (acc, top, total), given, visited, F, T)
    acc, top, total = sums[0], sums[1], sums[2]

    lse, factor = final_rows(top, total, F)
    part = wide_batch * SPLITS + split
    out_row = part * F.q_length * F.heads * F.value_dim + (rows * F.heads + head_number) * F.value_dim
    out = (acc * factor[:, None]).to(OUT.dtype.element_ty)
    inside = rows < F.q_length
    tl.store(
        OUT + out_row[:, None] + value_dims[None, :], out, mask=inside[:, None] & (value_dims < F.value_dim)[None, :]
    )
    tl.store(LSE + (part * F.heads + head_number) * F.q_length + rows, lse, mask=inside)


@triton.jit
def _seen(P, batch, queries, F: tl.constexpr, KV_TILE: tl.constexpr, SORTED: tl.constexpr):
    """The key tiles `[lo, hi)` that a tile of queries sees, and those of them, `[whole_lo, whole_hi)`, that need no
    mask.

    Conservative, as `ringattn_core.contract.tiles.Tiles` is. `SORTED`: positions of keys do not decrease, so that the
    first and the last key of a tile tell where it lies; otherwise every tile is seen and needs a mask.
    """
    TILES: tl.constexpr = (F.kv_length + KV_TILE - 1) // KV_TILE
    WHOLE: tl.constexpr = F.kv_length // KV_TILE
    lo = 0
    hi = TILES
    whole_lo = 0
    whole_hi = WHOLE
    if F.padded or (F.positions and not SORTED):
        whole_hi = 0
    elif F.below or F.above:
        positions = P.kv_positions + batch * F.kv_positions_batch
        if F.below:
            lo = _tiles_before(positions, tl.min(queries.low), F.kv_length, KV_TILE, KV_TILE - 1, False)
            whole_lo = _tiles_before(positions, tl.max(queries.low), F.kv_length, KV_TILE, 0, False)
        if F.above:
            hi = _tiles_before(positions, tl.max(queries.high), F.kv_length, KV_TILE, 0, True)
            whole_hi = _tiles_before(positions, tl.min(queries.high), F.kv_length, KV_TILE, KV_TILE - 1, True)
            whole_hi = tl.minimum(whole_hi, WHOLE)
    return lo, hi, whole_lo, whole_hi


@triton.jit
def _tiles_before(
    positions, limit, LENGTH: tl.constexpr, KV_TILE: tl.constexpr, KEY: tl.constexpr, INCLUSIVE: tl.constexpr
):
    """In how many key tiles key number `KEY` of the tile has a position below `limit`, or equal to it if `INCLUSIVE`.

    Positions do not decrease, so these are the first tiles. Looks at `SAMPLES` tiles first if there are more, and then
    at the tiles between two of them.
    """
    TILES: tl.constexpr = (LENGTH + KV_TILE - 1) // KV_TILE
    STRIDE: tl.constexpr = (TILES + SAMPLES - 1) // SAMPLES
    start = 0
    if STRIDE > 1:
        tile = tl.arange(0, SAMPLES) * STRIDE
        found = _before(positions, limit, tile, tile < TILES, LENGTH, KV_TILE, KEY, INCLUSIVE)
        start = tl.maximum(found - 1, 0) * STRIDE
    WIDTH: tl.constexpr = STRIDE if STRIDE > 1 else TILES
    number = tl.arange(0, triton.next_power_of_2(WIDTH))
    tile = start + number
    return start + _before(positions, limit, tile, (number < WIDTH) & (tile < TILES), LENGTH, KV_TILE, KEY, INCLUSIVE)


@triton.jit
def _before(
    positions, limit, tile, inside, LENGTH: tl.constexpr, KV_TILE: tl.constexpr, KEY: tl.constexpr,
    INCLUSIVE: tl.constexpr,
):  # fmt: skip
    """How many of the tiles with numbers `tile` are `inside`, and `_tiles_before` counts them."""
    key = tl.minimum(tile * KV_TILE + KEY, LENGTH - 1)
    position = tl.load(positions + key, mask=inside, other=0)
    before = position <= limit if INCLUSIVE else position < limit
    return tl.sum((inside & before).to(tl.int32))


@triton.jit
def _part(seen, split, SPLITS: tl.constexpr):
    """The `Visit` of part number `split` of the tiles that `_seen` returns."""
    lo, hi, whole_lo, whole_hi = seen
    count = tl.maximum(hi - lo, 0)
    start = lo + count * split // SPLITS
    end = lo + count * (split + 1) // SPLITS
    whole_from = tl.minimum(tl.maximum(whole_lo, start), end)
    whole_to = tl.minimum(tl.maximum(whole_hi, whole_from), end)
    return Visit(whole_from - start + end - whole_to, whole_from, whole_to, start, whole_from - start, whole_to, 0)


@triton.jit
def merge(
    OUT_PARTS, LSE_PARTS, OUT, LSE,
    F: tl.constexpr, SPLITS: tl.constexpr, PLACES: tl.constexpr, VALUE_DIM: tl.constexpr,
):  # fmt: skip
    """Merges the `SPLITS` partial results that `forward` writes for a query of a head, one program for each.

    `PLACES` is the least power of two that is at least `SPLITS`.
    """
    program = tl.program_id(0)
    query = program // F.heads % F.q_length
    head_number = program % F.heads
    batch = (program // (F.heads * F.q_length)).to(tl.int64)
    split = tl.arange(0, PLACES)
    value_dims = tl.arange(0, VALUE_DIM)
    part = batch * SPLITS + split
    lse = tl.load(
        LSE_PARTS + (part * F.heads + head_number) * F.q_length + query, mask=split < SPLITS, other=-float("inf")
    )
    inside = (split < SPLITS)[:, None] & (value_dims < F.value_dim)[None, :]
    row = (part * F.q_length + query) * F.heads + head_number
    out = tl.load(OUT_PARTS + row[:, None] * F.value_dim + value_dims[None, :], mask=inside, other=0.0)
    top = tl.max(lse, 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    weights = tl.exp2((lse - base) * LOG2_E)
    total = tl.sum(weights, 0)
    divisor = tl.where(total == 0.0, 1.0, total)
    merged = tl.sum(out * weights[:, None], 0) / divisor
    at = (batch * F.q_length + query) * F.heads + head_number
    tl.store(OUT + at * F.value_dim + value_dims, merged.to(OUT.dtype.element_ty), mask=value_dims < F.value_dim)
    nothing = total == 0.0
    found = tl.where(nothing, -float("inf"), base + tl.log2(divisor) / LOG2_E)
    tl.store(LSE + (batch * F.heads + head_number) * F.q_length + query, found)
