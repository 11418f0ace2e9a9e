# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false
"""How keys and values come to be one array without anything in it that is no number, in one pass over memory."""

import triton
import triton.language as tl


@triton.jit
def packing(K, V, KV, COUNT: tl.constexpr, TILE: tl.constexpr, POISON: tl.constexpr):
    """`KV` is K, then V; where either holds no finite number V is zero, and K is NaN if `POISON`, else zero."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < COUNT
    k = tl.load(K + at, mask=inside, other=0.0)
    v = tl.load(V + at, mask=inside, other=0.0)
    largest = tl.maximum(tl.abs(k.to(tl.float32)), tl.abs(v.to(tl.float32)), propagate_nan=tl.PropagateNan.ALL)
    good = largest < float("inf")
    bad_key = float("nan") if POISON else 0.0
    tl.store(KV + at, tl.where(good, k, bad_key).to(k.dtype), mask=inside)
    tl.store(KV + COUNT + at, tl.where(good, v, 0.0).to(v.dtype), mask=inside)
