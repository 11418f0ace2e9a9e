# SPDX-License-Identifier: Apache-2.0
"""One new token of each sequence against its cache, on one GPU: ours beside cuDNN, and the floor of bytes, in us.

`python decode.py 16x32k`, or no name for all caches. "Call" is a call by itself, from a host that queues calls: below
50 us the host decides. "Layer" is one of `LAYERS` calls of one program, each of which takes its queries from the call
before, as a model does. All programs are compiled, several at a time, before the first is timed.
"""

import argparse
import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from floors import rates
from interleaved import ON_A_DEVICE, medians, report
from measuring import TOLERANCES, relative
from ringattn_core import decode_attention
from workloads import Shape

LAYERS: Final = 16
OURS: Final = "ours"
RIVAL: Final = "cuDNN"


@dataclasses.dataclass(frozen=True)
class Cache:
    """The caches of a batch; with a `window`, the new token sees so many keys, and cuDNN has no such mask."""

    shape: Shape
    window: int | None = None

    @property
    def floor(self) -> float:
        """The least seconds to read the keys and values that are seen."""
        shape = self.shape
        seen = shape.batch * (self.window or shape.tokens) * shape.kv_heads * (shape.head_size + shape.values)
        return seen * jnp.dtype(shape.dtype).itemsize / rates().memory

    def attentions(self) -> dict[str, Callable[..., jax.Array]]:
        """The candidates, as functions of query, key and value."""
        window = None if self.window is None else (self.window - 1, 0)
        ours = functools.partial(decode_attention, lengths=self.shape.tokens, sliding_window=window, backend="triton")
        rival = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
        return {OURS: ours} if window else {OURS: ours, RIVAL: rival}


CACHES: Final = {
    "16x32k": Cache(Shape(16, 32768, 64, 8, 64)),
    "64x4k": Cache(Shape(64, 4096, 32, 8, 128)),
    "64x4k of 64": Cache(Shape(64, 4096, 64, 8, 64)),
    "16x8k": Cache(Shape(16, 8192, 32, 8, 128)),
    "8x16k": Cache(Shape(8, 16384, 64, 8, 128)),
    "1x128k": Cache(Shape(1, 131072, 32, 8, 128)),
    "1x128k of 64": Cache(Shape(1, 131072, 64, 8, 64)),
    "window, 16x32k": Cache(Shape(16, 32768, 32, 8, 128), 1024),
    "window, 16x32k of 64": Cache(Shape(16, 32768, 64, 8, 64), 1024),
}


def layered(attend: Callable[..., jax.Array], query: jax.Array, *caches: jax.Array) -> jax.Array:
    """`LAYERS` calls, over two caches in turns, so that no cache stays in the GPU's own."""
    for number in range(LAYERS):
        at = 2 * (number % 2)
        query = attend(query, *caches[at : at + 2])
    return query


def programs(cache: Cache) -> dict[tuple[str, int], Any]:
    """The lowered programs, by candidate and number of calls."""
    query, key, value, _ = jax.eval_shape(lambda: cache.shape.arrays(1))
    found = {}
    for who, attend in cache.attentions().items():
        found[who, 1] = jax.jit(attend).lower(query, key, value)
        found[who, LAYERS] = jax.jit(functools.partial(layered, attend)).lower(query, key, value, key, value)
    return found


def measure(names: list[str], rounds: int) -> None:
    """Prints a row for each cache, and all microseconds after the table."""
    lowered = {(name, *key): program for name in names for key, program in programs(CACHES[name]).items()}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = dict(zip(lowered, pool.map(lambda program: program.compile(), lowered.values()), strict=True))
    raw = {}
    print("| cache | floor | call: ours | cuDNN | layer: ours | cuDNN |\n|---|---|---|---|---|---|")
    for name in names:
        cache = CACHES[name]
        query, key, value, _ = cache.shape.arrays(1)
        caches = key, value, key[::-1] + 0, value[::-1] + 0
        cells = [f"{1e6 * cache.floor:.0f}"]
        outputs = [compiled[name, who, 1](query, key, value) for who in cache.attentions()]
        if relative(outputs[0], outputs[-1]) > TOLERANCES[cache.shape.dtype]:
            raise SystemExit(f"{name}: {RIVAL} and ours compute different things")
        for calls, arrays in ((1, caches[:2]), (LAYERS, caches)):
            runs = {who: functools.partial(compiled[name, who, calls], query, *arrays) for who in cache.attentions()}
            seconds = {who: x / calls for who, x in medians(runs, rounds, ON_A_DEVICE).items()}
            cells += [f"{1e6 * seconds[who]:.1f}" if who in seconds else "-" for who in (OURS, RIVAL)]
            raw |= {f"{name}, {calls} calls: {who}, us": 1e6 * x for who, x in seconds.items()}
        print("| " + " | ".join([name, *cells]) + " |", flush=True)
    report("decode.py", [], raw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("caches", nargs="*", metavar="CACHE", help=f"of {', '.join(CACHES)}")
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    if unknown := [name for name in asked.caches if name not in CACHES]:
        raise SystemExit(f"there is no cache {unknown[0]!r} among {', '.join(CACHES)}")
    if jax.default_backend() != "gpu":
        raise SystemExit("this benchmark needs a GPU, and JAX sees none in this process")
    measure(asked.caches or list(CACHES), asked.rounds)


if __name__ == "__main__":
    main()
