# SPDX-License-Identifier: Apache-2.0
"""Attention to chosen keys on one Hopper beside jax-linear-attention's: the time of theirs over ours.

- "DSA": each query attends to 2,048 single keys that all heads share. They are given,
  drawn at random, some of them twice.
- "MoBA": each head attends to its own block and to those whose mean key fits its query best.
- "NSA": compressed keys, the blocks with the highest weights there, and a window, each times a gate.

Theirs computes DSA in kernels with a mask for some thousands of queries at a time, and MoBA and NSA in plain JAX, with
arrays of a number for each head, query and key. Results that differ end the script before they are timed.
"""

import argparse
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from interleaved import ON_A_DEVICE, medians, ours, report, with_gradients
from measuring import relative
from ringattn_sparse import select
from workloads import Shape

Call = Callable[..., jax.Array]
TOLERANCE = 5e-2
"""The largest relative error of an output or gradient; the scores that choose may round to another order."""
attend = functools.partial(ours, causal=True, backend="triton")


def dsa(shape: Shape, count: int = 2048) -> tuple[Call, Call]:
    from jla.ops.mosaic_gpu.dsa import dsa_attention  # pyright: ignore[reportMissingImports]

    index = np.arange(shape.tokens)[:, None]
    drawn = np.random.default_rng(0).random((shape.tokens, count), np.float32)
    ids = jnp.asarray(np.concatenate([drawn[:, 1:] * index, index], 1).astype(np.int32))[None]

    def mine(*arrays: jax.Array) -> jax.Array:
        # Ids come with the data: behind a barrier the compiler does not know them.
        return attend(selected=jax.lax.optimization_barrier(ids)[:, :, None], selected_size=1)(*arrays)

    return mine, lambda *arrays: dsa_attention(*arrays, jax.lax.optimization_barrier(ids))


def moba(shape: Shape, count: int = 8, size: int = 256) -> tuple[Call, Call]:
    from jla.ops.moba import moba_attention  # pyright: ignore[reportMissingImports]

    def mine(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        choice = {"count": count, "size": size, "groups": shape.heads, "pool": "mean", "forced": (0, 1)}
        ids = select(query, key, causal=True, activation=None, **choice)
        return attend(selected=ids, selected_size=size)(query, key, value)

    return mine, functools.partial(moba_attention, block_size=size, top_k=count)


def nsa(shape: Shape, count: int = 16, size: int = 64, window: int = 512) -> tuple[Call, Call]:
    from jla.ops.sparse_attention import nsa  # pyright: ignore[reportMissingImports]

    gates = jax.nn.sigmoid(jax.random.normal(jax.random.key(1), (3, 1, shape.tokens, shape.heads)))

    def mine(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        coarse_key, coarse_value = (x.reshape(1, -1, size, *x.shape[2:]).mean(2) for x in (key, value))
        positions = jnp.arange(shape.tokens, dtype=jnp.int32)
        places = {"q_positions": positions, "kv_positions": positions[size - 1 :: size]}
        coarse, lse = attend(return_lse=True, **places)(query, coarse_key, coarse_value)
        lse = jnp.swapaxes(jnp.where(jnp.isfinite(lse), lse, 0), 1, 2)[..., None]
        wide, keys = query.astype(jnp.float32) * shape.head_size**-0.5, key.astype(jnp.float32)
        wide, keys = jnp.concatenate([wide, -lse], -1), jnp.concatenate([keys, jnp.ones_like(keys[..., :1])], -1)
        choice = {"count": count, "size": size, "groups": shape.kv_heads, "pool": "mean", "forced": (1, 2)}
        ids = select(wide, keys, causal=True, activation=jnp.exp, **choice)
        fine = attend(selected=ids, selected_size=size)(query, key, value)
        near = attend(sliding_window=(window - 1, 0))(query, key, value)
        branches = zip((coarse, fine, near), gates, strict=True)
        return jnp.stack([x.astype(jnp.float32) * gate[..., None] for x, gate in branches]).sum(0).astype(query.dtype)

    return mine, lambda *arrays: nsa(*arrays, *gates, block_size=size, block_count=count, window_size=window)


CASES: dict[str, tuple[Shape, Callable[[Shape], tuple[Call, Call]]]] = {
    "DSA, 16k": (Shape(1, 16384, 64, 4, 128), dsa),
    "DSA, 32k": (Shape(1, 32768, 64, 4, 128), dsa),
    "MoBA, 8k": (Shape(1, 8192, 16, 16, 128), moba),
    "NSA, 4k": (Shape(1, 4096, 64, 4, 128), nsa),
}
"""Shapes, and functions that make both calls: ours and theirs."""


def measured(name: str, shape: Shape, calls: tuple[Call, Call], rounds: int) -> dict[str, float]:
    """The milliseconds of both, and the largest relative error between their results, for each part."""
    raw: dict[str, float] = {}
    arrays = shape.arrays()
    for part, given in (("forward", arrays[:3]), ("forward+backward", arrays)):
        functions = [call if part == "forward" else with_gradients(call) for call in calls]
        programs = [functools.partial(jax.jit(x).lower(*given).compile(), *given) for x in functions]
        mine, theirs = (jax.tree.leaves(program()) for program in programs)
        error = max(map(relative, mine, theirs))
        if error > TOLERANCE:
            raise SystemExit(f"{name}, {part}: the results differ by {error:.1e}")
        seconds = medians(dict(zip(("ours", "theirs"), programs, strict=True)), rounds, ON_A_DEVICE)
        raw |= {f"{name}, {part}: error": error} | {f"{name}, {part}: {x}, ms": 1e3 * t for x, t in seconds.items()}
        print(f"{name}, {part}: theirs over ours {seconds['theirs'] / seconds['ours']:.2f}", flush=True)
    return raw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=CASES, help="one case")
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    raw: dict[str, float] = {}
    for name in [asked.only] if asked.only else CASES:
        shape, make = CASES[name]
        raw |= measured(name, shape, make(shape), asked.rounds)
    report("selected_rivals.py", [], raw)


if __name__ == "__main__":
    main()
