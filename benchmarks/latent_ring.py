# SPDX-License-Identifier: Apache-2.0
"""Multi-head latent attention on a ring of GPUs: what `expand` saves over sending the keys and values of all heads.

Causal, zigzag, DeepSeek V3's sizes. "expand": the latent and the rotated key travel, and each rank computes keys and
values of all heads on arrival, again in the backward pass. "whole": each rank computes its own keys and values once,
and they travel. Both times include this computation, and with gradients those of the latent and of the weights.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from interleaved import ON_A_DEVICE, medians, report, with_gradients
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ringattn_core import ring_attention

SIZE, ROTATED, LATENT = 128, 64, 512


def key_and_value(x: jax.Array, weights: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Keys and values of all heads, of the tokens in `x`, whose last numbers are the rotated key."""
    key, value = (jnp.einsum("btc,cnh->btnh", x[..., :LATENT], each) for each in weights)
    rotated = jnp.broadcast_to(x[:, :, None, LATENT:], (*key.shape[:3], ROTATED))
    return jnp.concatenate([key, rotated], -1), value


def attends(mesh: Mesh, backend: str) -> dict[str, Any]:
    """Both ways, as functions of the query, the latent and the two weights."""
    ring = {"causal": True, "layout": "zigzag", "mesh": mesh, "axis_name": "sp", "backend": backend}

    def expand(query: jax.Array, x: jax.Array, *weights: jax.Array) -> jax.Array:
        return ring_attention(query, x, expand=key_and_value, expand_params=weights, **ring)

    def whole(query: jax.Array, x: jax.Array, *weights: jax.Array) -> jax.Array:
        return ring_attention(query, *key_and_value(x, weights), **ring)

    return {"expand": expand, "whole": whole}


def arrays(mesh: Mesh, tokens: int, count: int) -> list[jax.Array]:
    """Query, latent, the weights of keys and of values, and the cotangent of the output."""
    shapes = [(1, tokens, count, SIZE + ROTATED), (1, tokens, LATENT + ROTATED)]
    shapes += [(LATENT, count, SIZE)] * 2 + [(1, tokens, count, SIZE)]
    scales = [1.0, 1.0, LATENT**-0.5, LATENT**-0.5, 1.0]
    places = [PartitionSpec(None, "sp")] * 2 + [PartitionSpec()] * 2 + [PartitionSpec(None, "sp")]
    drawn = zip(jax.random.split(jax.random.key(0), 5), shapes, scales, places, strict=True)
    return [
        jax.device_put((scale * jax.random.normal(key, shape)).astype(jnp.bfloat16), NamedSharding(mesh, place))
        for key, shape, scale, place in drawn
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--tokens", type=int, nargs="*", default=[65536], help="of the whole ring")
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    if jax.default_backend() != "gpu" or len(jax.devices()) < 2:
        raise SystemExit("this benchmark needs several GPUs in one process")
    mesh, raw = Mesh(np.array(jax.devices()), ("sp",)), {}
    for tokens in asked.tokens:
        inputs = arrays(mesh, tokens, asked.heads)
        for part, given in (("forward", inputs[:-1]), ("forward+backward", inputs)):
            runs = {}
            for name, attend in attends(mesh, asked.backend).items():
                program = jax.jit(attend if part == "forward" else with_gradients(attend))
                runs[name] = functools.partial(program.lower(*given).compile(), *given)
            seconds = medians(runs, asked.rounds, least=ON_A_DEVICE)
            print(
                f"{tokens} tokens, {part}: whole over expand {seconds['whole'] / seconds['expand']:.3f}",
                file=sys.stderr,
            )
            raw |= {f"{tokens} tokens, {part}: {name}, ms": 1e3 * x for name, x in seconds.items()}
    report("latent_ring.py", [], raw)


if __name__ == "__main__":
    main()
