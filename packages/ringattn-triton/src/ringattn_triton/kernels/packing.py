# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false
"""How keys and values come to be one array without anything in it that is no number, in one pass over memory.

Or in none, where a look at them, which is half a pass, finds nothing but numbers: a kernel then reads them as they are.
"""

import triton
import triton.language as tl


@triton.jit
def packing(K, V, KV, COUNT: tl.constexpr, TILE: tl.constexpr, POISON: tl.constexpr):
    """`KV` is K, then V; where either holds no finite number V is zero, and K is NaN if `POISON`, else zero."""
    _packed(K, V, KV, tl.program_id(0), COUNT, TILE, POISON)


@triton.jit
def packing_if_bad(K, V, FOUND, KV, COUNT: tl.constexpr, TILE: tl.constexpr, POISON: tl.constexpr):
    """`packing` by a few programs, if `looking` found anything; else `KV` holds anything."""
    if tl.load(FOUND) != 0:
        for number in range(tl.program_id(0), tl.cdiv(COUNT, TILE), tl.num_programs(0)):
            _packed(K, V, KV, number, COUNT, TILE, POISON)


@triton.jit
def looking(K, V, NOTHING, FOUND, COUNT: tl.constexpr, TILE: tl.constexpr):
    """Counts the tiles of K and V in which anything is no finite number: nothing times that is zero."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < COUNT
    k = tl.load(K + at, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(V + at, mask=inside, other=0.0).to(tl.float32)
    nothing = tl.sum(k * 0.0 + v * 0.0, 0)
    if nothing != 0.0:
        tl.atomic_add(FOUND, 1, sem="relaxed")


@triton.jit
def _packed(K, V, KV, number, COUNT: tl.constexpr, TILE: tl.constexpr, POISON: tl.constexpr):
    """One tile of `packing`."""
    at = number.to(tl.int64) * TILE + tl.arange(0, TILE)
    inside = at < COUNT
    k = tl.load(K + at, mask=inside, other=0.0)
    v = tl.load(V + at, mask=inside, other=0.0)
    largest = tl.maximum(tl.abs(k.to(tl.float32)), tl.abs(v.to(tl.float32)), propagate_nan=tl.PropagateNan.ALL)
    good = largest < float("inf")
    bad_key = float("nan") if POISON else 0.0
    tl.store(KV + at, tl.where(good, k, bad_key).to(k.dtype), mask=inside)
    tl.store(KV + COUNT + at, tl.where(good, v, 0.0).to(v.dtype), mask=inside)


@triton.jit
def sources(KV, OWN_K, OWN_V, FOUND, F: tl.constexpr):
    """Where keys and values are: as they came, where there are such and `looking` found nothing, or packed."""
    k = KV
    v = KV + F.value_at
    if F.own:
        bad = tl.load(FOUND) != 0
        k = tl.where(bad, k, OWN_K)
        v = tl.where(bad, v, OWN_V)
    return k, v
