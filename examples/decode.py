# SPDX-License-Identifier: Apache-2.0
"""Prefills prompts in chunks and decodes, from a cache sharded over 8 CPU devices, with a small random model."""

import argparse
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ringattn_core import decode_attention, prefill_attention, ring_attention, write_cache

HEADS, KEY_HEADS, HEAD_SIZE, WIDTH, VOCABULARY, WINDOW = 8, 2, 16, 64, 101, 48
Weights = dict[str, jax.Array]
Cache = tuple[jax.Array, jax.Array]


def random_weights(seed: int) -> Weights:
    """One layer of attention between an embedding and the logits."""
    shapes = {
        "embedding": (VOCABULARY, WIDTH),
        "query": (WIDTH, HEADS, HEAD_SIZE),
        "key": (WIDTH, KEY_HEADS, HEAD_SIZE),
        "value": (WIDTH, KEY_HEADS, HEAD_SIZE),
        "out": (HEADS, HEAD_SIZE, WIDTH),
        "logits": (WIDTH, VOCABULARY),
        "sinks": (HEADS,),
    }
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return {
        name: jax.random.normal(key, shape) / shape[0] ** 0.5
        for key, (name, shape) in zip(keys, shapes.items(), strict=True)
    }


def projected(weights: Weights, tokens: jax.Array) -> tuple[jax.Array, ...]:
    x = weights["embedding"][tokens]
    return (x, *(jnp.einsum("btm,mnh->btnh", x, weights[name]) for name in ("query", "key", "value")))


def next_tokens(weights: Weights, x: jax.Array, attended: jax.Array) -> jax.Array:
    """The likeliest token after each position."""
    x = x + jnp.einsum("btnh,nhm->btm", attended, weights["out"])
    return jnp.argmax(x @ weights["logits"], -1)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def prefill(mesh: Mesh, weights: Weights, cache: Cache, chunk: jax.Array, start: jax.Array) -> tuple[Cache, jax.Array]:
    """Writes a chunk of the prompts to the cache. Returns the cache and the token after each position of the chunk.

    One program serves all chunks. The padding of shorter prompts comes after their tokens, which do not see it.
    """
    x, query, *new = projected(weights, chunk)
    key, value = write_cache(cache, tuple(new), start + jnp.arange(chunk.shape[1]), mesh=mesh, axis_name="sp")
    lengths = jnp.full(chunk.shape[0], start + chunk.shape[1])
    out = prefill_attention(
        query, key, value, lengths, weights["sinks"], sliding_window=(WINDOW, 0), mesh=mesh, axis_name="sp"
    )
    return (key, value), next_tokens(weights, x, out)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def step(mesh: Mesh, weights: Weights, cache: Cache, token: jax.Array, lengths: jax.Array) -> tuple[Cache, jax.Array]:
    """Writes one token of each row to the cache, and returns the cache and the next token."""
    x, query, *new = projected(weights, token)
    key, value = write_cache(cache, tuple(new), lengths[:, None], mesh=mesh, axis_name="sp")
    out = decode_attention(
        query, key, value, lengths + 1, weights["sinks"], sliding_window=(WINDOW, 0), mesh=mesh, axis_name="sp"
    )
    return (key, value), next_tokens(weights, x, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--room", type=int, default=256, help="tokens that the cache has room for")
    parser.add_argument("--chunk", type=int, default=64, help="tokens to prefill at once, a divisor of --room")
    parser.add_argument("--steps", type=int, default=20, help="tokens to decode")
    arguments = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)

    mesh = Mesh(np.array(jax.devices()), ("sp",))
    weights, lengths = random_weights(0), jnp.array([100, 37, 5])
    prompt = jax.random.randint(jax.random.key(1), (lengths.size, arguments.room), 0, VOCABULARY)
    shape = (lengths.size, arguments.room, KEY_HEADS, HEAD_SIZE)
    split = NamedSharding(mesh, PartitionSpec(None, "sp"))
    cache = jnp.zeros(shape, device=split), jnp.zeros(shape, device=split)
    following = []
    for start in range(0, int(lengths.max()), arguments.chunk):
        chunk = prompt[:, start : start + arguments.chunk]
        cache, tokens = prefill(mesh, weights, cache, chunk, jnp.int32(start))
        following.append(tokens)
    token = jnp.take_along_axis(jnp.concatenate(following, 1), lengths[:, None] - 1, 1)
    written, start = [token], lengths
    for _ in range(arguments.steps):
        cache, token = step(mesh, weights, cache, token, lengths)
        lengths = lengths + 1
        written.append(token)
    found = jnp.concatenate(written, 1)

    # The same tokens in one pass over the whole sequence, on one device.
    whole = np.array(prompt)
    for row, (begin, new) in enumerate(zip(start, found, strict=True)):
        whole[row, begin : begin + new.size] = new
    x, query, key, value = projected(weights, jnp.asarray(whole))
    out = ring_attention(query, key, value, weights["sinks"], causal=True, sliding_window=(WINDOW, 0))
    expected = np.asarray(next_tokens(weights, x, out))
    for row, (begin, new) in enumerate(zip(start, found, strict=True)):
        agree = (expected[row, begin - 1 : begin - 1 + new.size] == new).all()
        print(f"row {row}: {int(begin)} tokens and {new.size} decoded: {' '.join(map(str, new[:8]))} ...", end=" ")
        print("as in one pass" if agree else "NOT as in one pass")
        assert agree


if __name__ == "__main__":
    main()
