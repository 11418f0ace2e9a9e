# SPDX-License-Identifier: Apache-2.0
"""Attention and its backward pass in Triton, launched by `jax_triton.triton_call`, as a block kernel."""

import jax
import jax.numpy as jnp
import jax_triton  # pyright: ignore[reportMissingImports]
import triton
import triton.language as tl
from ringattn_core import from_flash

TILE = 64
Static = tl.constexpr


@triton.jit
def at(rows, batch, head, length: Static, heads: Static, size: Static):
    """Where `rows` of one head lie in an array [B, length, heads, size]."""
    return ((batch * length + rows[:, None]) * heads + head) * size + tl.arange(0, size)[None, :]


@triton.jit
def rows_of(x, rows, batch, head, length: Static, heads: Static, size: Static):
    """`rows` of one head; zeros beyond the end."""
    return tl.load(x + at(rows, batch, head, length, heads, size), mask=rows[:, None] < length, other=0.0)


@triton.jit
def scores(x, y, rows, columns, keys: Static, scale: Static, causal: Static):
    """The scores of queries `x` and keys `y` in powers of two, -1e30 where a query does not see the key."""
    seen = columns[None, :] < keys
    if causal:
        seen = seen & (columns[None, :] <= rows[:, None])
    return tl.where(seen, tl.dot(x, tl.trans(y)) * (scale * 1.4426950408889634), -1e30)


@triton.jit
def attend(q, k, v, out, lse, T: Static, S: Static, N: Static, K: Static, H: Static,
           scale: Static, causal: Static, tile: Static):  # fmt: skip
    batch, head = tl.program_id(1) // N, tl.program_id(1) % N
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    x = rows_of(q, rows, batch, head, T, N, H)
    largest, total = tl.full((tile,), -1e30, tl.float32), tl.zeros((tile,), tl.float32)
    sums = tl.zeros((tile, H), tl.float32)
    end = tl.minimum(S, (tl.program_id(0) + 1) * tile) if causal else S
    for first in range(0, end, tile):
        columns = first + tl.arange(0, tile)
        y = rows_of(k, columns, batch, head // (N // K), S, K, H)
        z = rows_of(v, columns, batch, head // (N // K), S, K, H)
        s = scores(x, y, rows, columns, S, scale, causal)
        larger = tl.maximum(largest, tl.max(s, 1))
        p, shrink = tl.exp2(s - larger[:, None]), tl.exp2(largest - larger)
        total = total * shrink + tl.sum(p, 1)
        sums = sums * shrink[:, None] + tl.dot(p.to(z.dtype), z)
        largest = larger
    tl.store(out + at(rows, batch, head, T, N, H), sums / total[:, None], mask=rows[:, None] < T)
    tl.store(lse + tl.program_id(1) * T + rows, (largest + tl.log2(total)) * 0.6931471805599453, mask=rows < T)


@triton.jit
def of_queries(q, k, v, dout, lse, delta, dq, T: Static, S: Static, N: Static, K: Static, H: Static,
               scale: Static, causal: Static, tile: Static):  # fmt: skip
    batch, head = tl.program_id(1) // N, tl.program_id(1) % N
    rows = tl.program_id(0) * tile + tl.arange(0, tile)
    x, dx = rows_of(q, rows, batch, head, T, N, H), rows_of(dout, rows, batch, head, T, N, H)
    row_lse = tl.load(lse + tl.program_id(1) * T + rows, mask=rows < T, other=0.0) * 1.4426950408889634
    row_delta = tl.load(delta + tl.program_id(1) * T + rows, mask=rows < T, other=0.0)
    sums = tl.zeros((tile, H), tl.float32)
    end = tl.minimum(S, (tl.program_id(0) + 1) * tile) if causal else S
    for first in range(0, end, tile):
        columns = first + tl.arange(0, tile)
        y = rows_of(k, columns, batch, head // (N // K), S, K, H)
        z = rows_of(v, columns, batch, head // (N // K), S, K, H)
        p = tl.exp2(scores(x, y, rows, columns, S, scale, causal) - row_lse[:, None])
        ds = p * (tl.dot(dx, tl.trans(z)) - row_delta[:, None])
        sums += tl.dot(ds.to(y.dtype), y)
    tl.store(dq + at(rows, batch, head, T, N, H), sums * scale, mask=rows[:, None] < T)


@triton.jit
def of_keys(q, k, v, dout, lse, delta, dk, dv, T: Static, S: Static, N: Static, K: Static, H: Static,
            scale: Static, causal: Static, tile: Static):  # fmt: skip
    batch, key_head = tl.program_id(1) // K, tl.program_id(1) % K
    columns = tl.program_id(0) * tile + tl.arange(0, tile)
    y, z = rows_of(k, columns, batch, key_head, S, K, H), rows_of(v, columns, batch, key_head, S, K, H)
    sums, value_sums = tl.zeros((tile, H), tl.float32), tl.zeros((tile, H), tl.float32)
    begin = tl.program_id(0) * tile if causal else 0
    for head in range(key_head * (N // K), (key_head + 1) * (N // K)):
        for first in range(begin, T, tile):
            rows = first + tl.arange(0, tile)
            x, dx = rows_of(q, rows, batch, head, T, N, H), rows_of(dout, rows, batch, head, T, N, H)
            row_lse = tl.load(lse + (batch * N + head) * T + rows, mask=rows < T, other=0.0) * 1.4426950408889634
            row_delta = tl.load(delta + (batch * N + head) * T + rows, mask=rows < T, other=0.0)
            p = tl.exp2(scores(x, y, rows, columns, S, scale, causal) - row_lse[:, None])
            ds = p * (tl.dot(dx, tl.trans(z)) - row_delta[:, None])
            value_sums += tl.dot(tl.trans(p).to(dx.dtype), dx)
            sums += tl.dot(tl.trans(ds).to(x.dtype), x)
    tl.store(dk + at(columns, batch, key_head, S, K, H), sums * scale, mask=columns[:, None] < S)
    tl.store(dv + at(columns, batch, key_head, S, K, H), value_sums, mask=columns[:, None] < S)


def launch(kernel, arrays, shapes, tokens, heads, **static):
    """One program for each tile of `tokens` and each of `heads`; heads are padded to one power of two."""
    (batch, T, N, H), (_, S, K, _) = arrays[0].shape, arrays[1].shape
    size = triton.next_power_of_2(max(16, H, arrays[2].shape[-1]))
    arrays = [jnp.pad(x, ((0, 0),) * 3 + ((0, size - x.shape[-1]),)) if x.ndim == 4 else x for x in arrays]
    results = [jax.ShapeDtypeStruct((*s[:3], size) if len(s) == 4 else s, jnp.float32) for s in shapes]
    found = jax_triton.triton_call(
        *arrays, kernel=kernel, out_type=results, grid=(triton.cdiv(tokens, TILE), batch * heads), num_warps=4,
        num_stages=2, T=T, S=S, N=N, K=K, H=size, tile=TILE, **static,
    )  # fmt: skip
    return [x[..., : s[-1]] for x, s in zip(found, shapes, strict=True)]


def forward(q, k, v, *, scale, causal):
    batch, tokens, heads, _ = q.shape
    shapes = (*q.shape[:3], v.shape[-1]), (batch, heads, tokens)
    return tuple(launch(attend, (q, k, v), shapes, tokens, heads, scale=scale, causal=causal))


def backward(q, k, v, out, lse, dout, *, scale, causal, delta):
    arrays, static = (q, k, v, dout.astype(q.dtype), lse, delta), {"scale": scale, "causal": causal}
    (dq,) = launch(of_queries, arrays, (q.shape,), q.shape[1], q.shape[2], **static)
    return dq, *launch(of_keys, arrays, (k.shape, v.shape), k.shape[1], k.shape[2], **static)


KERNEL = from_flash(forward, backward)
