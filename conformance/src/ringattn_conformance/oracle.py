# SPDX-License-Identifier: Apache-2.0
"""Computes the right answer: dense attention and its gradients in float64 NumPy, from the specification alone."""

import dataclasses
import functools
from typing import Any, Final

import ml_dtypes
import numpy as np

_LOW: Final = 0xFFFFFFFF
_FORBIDS: Final = -1e5
"""A bias below this masks out its pair of query and key, as -inf does."""
_LEAST: Final = 1e-5
"""Added to each weight and derivative of a score in `Answer.sizes` and `Answer.slack`: float16 rounds numbers below
6e-5 to multiples of 6e-8, not to a part of their own size. With dropout it is divided by the probability to keep,
because kernels may round first and divide the sums (FlashAttention-2 does)."""


@dataclasses.dataclass(frozen=True)
class Problem:
    """One call on whole sequences in natural order, as NumPy arrays; a field at its default is not part of the call.

    `kv_range` is the first and the last position that each query sees, numbers or arrays `[T]`, `[B|1, T]` or
    `[B|1, N|1, T]`. `selected` are the ids of the blocks of `selected_size` keys that each query sees, `[B, T, 1|K|N,
    n]`; -1 is none. `seen` is a further boolean mask, broadcastable to `[B, N, T, S]`: True where the query may see the
    key.
    """

    q: np.ndarray  # [B, T, N, H]
    k: np.ndarray  # [B, S, K, H]
    v: np.ndarray  # [B, S, K, Hv]
    causal: bool = False
    window: Any = None
    chunk: int | None = None
    q_segments: np.ndarray | None = None
    kv_segments: np.ndarray | None = None
    q_positions: np.ndarray | None = None
    kv_positions: np.ndarray | None = None
    kv_range: tuple[Any, Any] | None = None
    selected: np.ndarray | None = None
    selected_size: int = 1
    seen: np.ndarray | None = None
    soft_cap: float | None = None
    scale: float | None = None
    bias: np.ndarray | None = None
    slopes: np.ndarray | None = None
    sinks: np.ndarray | None = None
    dropout: float = 0.0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Answer:
    """Outputs and gradients, in the shapes of the inputs.

    `largest` is the largest magnitude of a score that any query sees, sinks included. `uncapped` is the same before the
    soft cap, and 0 without a cap: it says how large the products are that float32 rounds.
    `empty[B, N, T]` is True for rows that see no key. `max_logits[N]` is the largest score of each head.
    `slack` is an error that each gradient but `dv` may have beside its tolerance. It has two causes. A backend may
    compute `delta` from the rounded output: this counts for `dslopes` and `dsinks`, which sum over all queries, in
    every dtype, and for `dq`, `dk` and `dbias` in half precision. And in float32 terms are rounded that may cancel: the
    derivatives of a query that sees one key are 0, and what a kernel computes is rounding. This is the root of the sum
    of the squared terms, times their rounding.
    `sizes`, for inputs of half precision, has the size of each row of `out`, `dq`, `dk` and `dv`: the root of the sum
    of the squares of its terms. Rounding each term by a part of it changes the row by about that part of its size, also
    where the terms cancel.
    """

    out: np.ndarray
    lse: np.ndarray
    largest: float
    gradients: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    slack: dict[str, Any] = dataclasses.field(default_factory=dict)
    uncapped: float = 0.0
    empty: np.ndarray | None = None
    max_logits: np.ndarray | None = None
    sizes: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def by_name(self) -> dict[str, Any]:
        """All results: the outputs of a call and its gradients."""
        return {"out": self.out, "lse": self.lse, "max_logits": self.max_logits, **self.gradients}


def philox_4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox 4x32-10 of Salmon et al. for one counter, in Python integers."""
    a, b, c, d = counter
    for step in range(10):
        first, second = 0xD2511F53 * a, 0xCD9E8D57 * c
        of_b, of_d = key[0] + 0x9E3779B9 * step & _LOW, key[1] + 0xBB67AE85 * step & _LOW
        a, b, c, d = (second >> 32) ^ b ^ of_b, second & _LOW, (first >> 32) ^ d ^ of_d, first & _LOW
    return a, b, c, d


def philox_2x32(first: np.ndarray, second: np.ndarray, key: int) -> tuple[np.ndarray, np.ndarray]:
    """Philox 2x32-7 of Salmon et al., on counters that broadcast."""
    a, b = (x.astype(np.uint64) for x in np.broadcast_arrays(first, second))
    for step in range(7):
        product = np.uint64(0xD256D193) * a
        of_step = np.uint64(key + 0x9E3779B9 * step & _LOW)
        a, b = (product >> np.uint64(32)) ^ of_step ^ b, product & np.uint64(_LOW)
    return a, b


def kept(problem: Problem) -> np.ndarray:
    """True where dropout keeps the probability, `[B, N, T, S]`."""
    batch, rows, heads = problem.q.shape[:3]
    return _kept(batch, heads, rows, problem.k.shape[1], int(problem.seed) & _LOW, problem.dropout)


@functools.lru_cache(maxsize=4)
def _kept(batch: int, heads: int, rows: int, columns: int, seed: int, dropout: float) -> np.ndarray:
    i, j = np.arange(rows)[:, None], np.arange(columns)[None]
    number = np.broadcast_to(2 * (i // 8 % 2) + j // 8 % 2, (rows, columns))
    found = np.empty((batch, heads, rows, columns), bool)
    for b, n in np.ndindex(batch, heads):
        key = philox_4x32((n, b, 0, 0), (seed, 0))[0]
        low, high = philox_2x32(i // 16 * 8 + i % 8, j // 16 * 8 + j % 8, key)
        halves = np.stack([low & 0xFFFF, low >> 16, high & 0xFFFF, high >> 16])
        found[b, n] = np.take_along_axis(halves, number[None], 0)[0] >= np.uint64(np.floor(dropout * 2**16))
    found.setflags(write=False)
    return found


def keep_probability(problem: Problem) -> float:
    """One minus the probability of dropout, which is rounded down to a multiple of 2^-16."""
    return 1.0 - float(np.floor(problem.dropout * 2**16)) / 2**16


def positions(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The positions that masks compare, `[B|1, T]` and `[B|1, S]`; token indices if the problem has none."""
    q, kv = problem.q_positions, problem.kv_positions
    q = np.arange(problem.q.shape[1]) if q is None else np.asarray(q, np.int64)
    kv = np.arange(problem.k.shape[1]) if kv is None else np.asarray(kv, np.int64)
    return np.atleast_2d(q), np.atleast_2d(kv)


def bound_of_queries(bound: Any) -> np.ndarray:
    """One side of a `kv_range`, broadcastable to `[B, N, T, 1]`."""
    x = np.asarray(bound, np.int64)
    return (x[:, None] if x.ndim == 2 else x)[..., None]


def visible(problem: Problem) -> np.ndarray:
    """True where a query sees a key, `[B, N, T, S]`: every mask allows the pair, and no bias forbids it."""
    batch, rows, heads = problem.q.shape[:3]
    q, kv = positions(problem)
    i, j = q[:, None, :, None], kv[:, None, None, :]
    seen = np.ones((batch, heads, rows, problem.k.shape[1]), bool)
    if problem.causal:
        seen &= j <= i
    if problem.window is not None:
        left, right = problem.window if isinstance(problem.window, tuple) else (problem.window, problem.window)
        if left is not None:
            seen &= j >= i - left
        if right is not None:
            seen &= j <= i + right
    if problem.chunk is not None:
        seen &= (i // problem.chunk == j // problem.chunk) & (j <= i)
    if problem.kv_range is not None:
        first, last = map(bound_of_queries, problem.kv_range)
        seen &= (first <= j) & (j <= last)
    q_ids, kv_ids = problem.q_segments, problem.kv_segments
    if q_ids is not None and kv_ids is not None:
        of_query, of_key = q_ids[:, None, :, None], kv_ids[:, None, None, :]
        seen &= (of_query == of_key) & (of_query >= 0) & (of_key >= 0)
    if problem.selected is not None:
        seen &= chosen(problem)
    if problem.seen is not None:
        seen &= problem.seen
    if problem.bias is not None:
        seen &= np.asarray(problem.bias, np.float64) >= _FORBIDS
    return seen


def chosen(problem: Problem) -> np.ndarray:
    """True where a query has chosen the block of a key, `[B, N, T, S]`. Blocks count keys by their index."""
    assert problem.selected is not None
    keys, blocks = problem.k.shape[1], -(-problem.k.shape[1] // problem.selected_size)
    known = (problem.selected >= 0) & (problem.selected < blocks)
    ids = np.where(known, problem.selected, blocks)  # the last column is of no block
    of_blocks = np.zeros((*ids.shape[:3], blocks + 1), bool)
    np.put_along_axis(of_blocks, ids, True, 3)  # comparing each id with each key would take gigabytes
    of_groups = of_blocks[..., np.arange(keys) // problem.selected_size]
    return np.moveaxis(np.repeat(of_groups, problem.q.shape[2] // of_groups.shape[2], 2), 2, 1)


def distances(problem: Problem) -> np.ndarray:
    """The distances |i - j| of query and key positions, `[B|1, 1, T, S]`."""
    q, kv = positions(problem)
    return np.abs(q[:, None, :, None] - kv[:, None, None, :]).astype(np.float64)


def sinks_of_heads(sinks: np.ndarray, heads: int) -> np.ndarray:
    """Sinks as `[N, n]`, from `[N, n]`, `[N]` (one for each head) or `[n]` (shared by all heads)."""
    if sinks.ndim == 2:
        return sinks.astype(np.float64)
    if sinks.shape[0] == heads:
        return sinks.astype(np.float64)[:, None]
    return np.broadcast_to(sinks.astype(np.float64), (heads, sinks.shape[0]))


@np.errstate(under="ignore")
def attend(problem: Problem, dout: np.ndarray | None = None, dlse: np.ndarray | None = None) -> Answer:
    """The output and the lse; with `dout`, every gradient too. A row that sees no key has output 0."""
    q, k, v = (np.asarray(x, np.float64) for x in (problem.q, problem.k, problem.v))
    heads, kv_heads, head_dim = q.shape[2], k.shape[2], q.shape[3]
    group = heads // kv_heads
    of_head = np.arange(heads) // group
    k_heads, v_heads = k[:, :, of_head], v[:, :, of_head]
    scale = 1.0 / np.sqrt(head_dim) if problem.scale is None else problem.scale
    s = scale * per_pair(q, k_heads)
    slope_of_cap, seen, uncapped = None, visible(problem), 0.0
    if problem.soft_cap is not None:
        uncapped = float(np.max(np.abs(s), where=seen, initial=0.0))
        bent = np.tanh(s / problem.soft_cap)
        s, slope_of_cap = problem.soft_cap * bent, 1.0 - bent**2
    if problem.bias is not None:
        bias = np.asarray(problem.bias, np.float64)
        s = s + np.where(bias < _FORBIDS, 0.0, bias)
    if problem.slopes is not None:
        s = s - np.asarray(problem.slopes, np.float64)[None, :, None, None] * distances(problem)
    largest = float(np.max(np.abs(s), where=seen, initial=0.0))
    s, empty = np.where(seen, s, -np.inf), np.asarray(~seen.any(-1))
    max_logits = s.max((0, 2, 3))

    highest = s.max(-1, initial=-np.inf)
    sinks = None if problem.sinks is None else sinks_of_heads(np.asarray(problem.sinks), heads)
    if sinks is not None:
        highest = np.maximum(highest, sinks.max(-1, initial=-np.inf)[None, :, None])
        largest = max(largest, float(np.max(np.abs(sinks), where=np.isfinite(sinks), initial=0.0)))
    highest = np.where(np.isneginf(highest), 0.0, highest)
    p = np.exp(s - highest[..., None])
    weight = None if sinks is None else np.exp(sinks[None, :, None, :] - highest[..., None])
    total = p.sum(-1) if weight is None else p.sum(-1) + weight.sum(-1)
    lse = highest + np.log(total, where=total > 0, out=np.full_like(total, -np.inf))
    total = np.where(total > 0, total, 1.0)[..., None]
    p = p / total
    keep = kept(problem) / keep_probability(problem) if problem.dropout else np.ones_like(p)
    out = per_row(p * keep, v_heads)
    half = problem.q.dtype.itemsize == 2
    least = _LEAST / keep_probability(problem)
    kept_terms = (p * keep + least) ** 2
    sizes = {"out": _size(per_row(kept_terms, v_heads**2))} if half else {}
    if dout is None:
        return Answer(out, lse, largest, uncapped=uncapped, empty=empty, max_logits=max_logits, sizes=sizes)

    dout = np.asarray(dout, np.float64)
    dlse = np.zeros(lse.shape) if dlse is None else np.asarray(dlse, np.float64)
    if (q_ids := problem.q_segments) is not None:  # cotangents of padding count as zeros
        dout, dlse = (q_ids >= 0)[:, :, None, None] * dout, (q_ids >= 0)[:, None] * dlse
    delta = np.einsum("btnh,btnh->bnt", dout, out) - dlse
    dp = per_pair(dout, v_heads)
    ds = p * (keep * dp - delta[..., None])
    dz = ds if slope_of_cap is None else ds * slope_of_cap
    rounding = np.einsum("btnh,btnh->bnt", dout, out.astype(problem.v.dtype).astype(np.float64) - out)
    if half:  # a weight that is rounded, too, moves its part of the output as a whole
        rounding += np.copysign(0.5 * float(ml_dtypes.finfo(problem.q.dtype).eps) * (delta + dlse), rounding)
    slack = {}
    by_group = (*k.shape[:2], kv_heads, group)
    gradients = {
        "dq": scale * per_row(dz, k_heads),
        "dk": (scale * per_row(np.swapaxes(dz, 2, 3), q)).reshape(*by_group, -1).sum(3),
        "dv": per_row(np.swapaxes(p * keep, 2, 3), dout).reshape(*by_group, -1).sum(3),
    }
    of_delta = np.abs(delta) + np.sqrt(np.einsum("btnh,btnh->bnt", dout**2, out**2))
    of_scores = p * (np.abs(keep * dp) + of_delta[..., None])
    terms = (abs(scale) * of_scores + least * max(1.0, abs(scale))) ** 2
    of_keys = _size(per_row(np.swapaxes(terms, 2, 3), q**2).reshape(*by_group, -1).sum(3))
    of_terms = {"dq": _size(per_row(terms, k_heads**2)), "dk": of_keys}
    # `dp` and `delta` are sums of `value_dim` products, so their error is about half the root of `value_dim` roundings.
    # A row may have twice as much, because the worst of many rows is compared, and at least 4 roundings.
    eps, root = float(np.finfo(np.float32).eps), float(np.sqrt(v.shape[-1]))
    of_row, of_all = eps * max(4.0, root), eps * max(1.0, root / 2)
    if half:
        moved = scale * p * rounding[..., None]
        of_keys = per_row(np.swapaxes(moved, 2, 3), q).reshape(*by_group, -1).sum(3)
        for name, x in (("dq", per_row(moved, k_heads)), ("dk", of_keys)):
            slack[name] = 2 * np.abs(x).max(-1, keepdims=True)
        of_values = _size(per_row(np.swapaxes(kept_terms, 2, 3), dout**2).reshape(*by_group, -1).sum(3))
        sizes |= of_terms | {"dv": of_values}
    else:  # where terms cancel, as for a query that sees one key, their rounding is left
        slack |= {name: of_row * x for name, x in of_terms.items()}
    if problem.bias is not None:
        gradients["dbias"] = _summed_to(ds, problem.bias.shape)
        if half:
            slack["dbias"] = 2 * np.abs(_summed_to(p * rounding[..., None], problem.bias.shape))
        else:
            slack["dbias"] = of_row * np.sqrt(_summed_to(of_scores**2, problem.bias.shape))
    if problem.slopes is not None:
        gradients["dslopes"] = -np.sum(ds * distances(problem), (0, 2, 3))
        slack["dslopes"] = _of_sums(p * rounding[..., None] * distances(problem), (0, 2, 3), half)
        if not half:  # as above, for a sum over all queries, whose roundings are independent
            of_pairs = (of_scores * distances(problem)) ** 2
            slack["dslopes"] += of_all * float(np.sqrt(of_pairs.sum((0, 2, 3)).max()))
    if problem.sinks is not None and weight is not None:
        weight = weight / total
        of_heads = -np.sum(weight * delta[..., None], (0, 2))
        shared = problem.sinks.ndim == 1 and problem.sinks.shape[0] != heads
        over = (0, 1, 2) if shared else (0, 2)
        slack["dsinks"] = _of_sums(weight * rounding[..., None], over, half)
        if not half:
            slack["dsinks"] += of_all * float(np.sqrt(((weight * of_delta[..., None]) ** 2).sum(over).max()))
        gradients["dsinks"] = of_heads.sum(0) if shared else of_heads.reshape(problem.sinks.shape)
    return Answer(out, lse, largest, gradients, slack, uncapped, empty, max_logits, sizes)


def per_pair(rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """`btnh,bsnh->bnts`, ten times as fast as `np.einsum`"""
    return np.moveaxis(rows, 2, 1) @ np.moveaxis(columns, 1, 3)


def per_row(weights: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """`bnts,bsnh->btnh`"""
    return np.moveaxis(weights @ np.moveaxis(columns, 2, 1), 1, 2)


def _of_sums(terms: np.ndarray, over: tuple[int, ...], half: bool) -> float:
    """The largest sum of `terms`; in half precision at least three times what sums of terms of these sizes come to.

    A kernel that rounds weights too has errors of other signs, so the sum of these terms may be small by chance.
    """
    sums = float(np.abs(terms.sum(over)).max())
    return max(sums, 3 * float(np.sqrt((terms**2).sum(over)).max())) if half else sums


def _size(squares: np.ndarray) -> np.ndarray:
    """The size of each row, `[..., 1]`: the root of the largest of its components' sums of squares."""
    return np.sqrt(squares.max(-1, keepdims=True))


def _summed_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    axes = tuple(axis for axis, (full, kept) in enumerate(zip(x.shape, shape, strict=True)) if kept == 1 and full != 1)
    return x.sum(axes, keepdims=True)


def order(layout: str, ranks: int, length: int) -> np.ndarray:
    """For each place of a sequence in this layout, rank 0's tokens first: the token's index in natural order."""
    each = length // ranks
    if layout == "contiguous":
        return np.arange(length)
    if layout == "striped":
        return np.concatenate([rank + ranks * np.arange(each) for rank in range(ranks)])
    if layout == "zigzag":
        half = each // 2
        starts = [(rank * half, (2 * ranks - 1 - rank) * half) for rank in range(ranks)]
        return np.concatenate([start + np.arange(half) for pair in starts for start in pair])
    raise ValueError(f"layout {layout!r} is not one of contiguous, zigzag, striped")
