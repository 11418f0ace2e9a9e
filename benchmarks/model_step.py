# SPDX-License-Identifier: Apache-2.0
"""A training step of some layers of a model, with our attention and with those that a user would take instead.

    python model_step.py llama gemma --tokens 32768 131072 --json model_step.json  # on a Hopper; five minutes
    python model_step.py small --tokens 512 --rounds 1                             # on a CPU

A step is the forward pass, the backward pass and the update of the weights, for one sequence, in bfloat16; each layer
is rematerialised. The layers have the published sizes; the embedding and the vocabulary are left out, because they
would weigh more beside a few layers than beside all of them. All programs of a length are compiled before the first
runs, then they run in turns in one process. `kept` says what the backward pass need not compute again: with
`attention` the results of the attention kernel, which `ringattn_core.remat_policy` keeps for ours, and a policy of
one's own elsewhere. Memory is what the program holds at its peak, as XLA plans it: weights, activations, gradients.
"""

import argparse
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
from interleaved import Attention, measured_rounds
from jaxtyping import Array, Float
from measuring import relative
from ringattn_core import remat_policy
from rivals import OURS, RIVALS
from workloads import Shape, Workload

Weights = list[dict[str, jax.Array]]
"""One dictionary for each layer."""
LAYER: Final = {"query": "MNH", "key": "MKH", "value": "MKH", "out": "NHM", "gate": "MF", "up": "MF", "down": "FM"}
"""The axes of each matrix: model width M, heads N, key heads K, head size H, hidden F."""
RATE: Final = 1e-6
"""The step size of gradient descent. It is small, so that every step is as expensive as the first."""
NOTHING: Final = "nothing"
KEPT: Final = "attention"
TOLERANCE: Final = 0.2
"""The largest relative difference of gradients. Rounding to bfloat16 makes a few hundredths in some layers."""
KERNELS: Final = ("ffi_call", "dot_product_attention_fwd_wrapper")
"""The primitives whose results a policy has to keep: FlashAttention-3's, and cuDNN's."""
CANDIDATES: Final = {
    "gpu": [
        (OURS, KEPT),
        ("FlashAttention-3", NOTHING),
        ("FlashAttention-3", KEPT),
        ("cuDNN", NOTHING),
        ("cuDNN", KEPT),
    ],
    "cpu": [(OURS, KEPT), ("jax.nn", NOTHING)],
}
"""On each platform, by attention and what is kept. The first is compared with all others."""


@dataclasses.dataclass(frozen=True)
class Model:
    """Some layers of a model."""

    what: str
    width: int
    heads: int
    kv_heads: int
    head_size: int
    hidden: int
    windows: tuple[int | None, ...]
    """For each layer the keys that a query sees, itself included, or `None` for all before it."""
    theta: tuple[float, float]
    """The base of RoPE in layers with a window, and in the others."""
    gemma: bool = False
    """Whether layers normalise queries, keys and what they add, and their gate is GELU."""

    def workload(self, tokens: int, window: int | None) -> Workload:
        shape = Shape(1, tokens, self.heads, self.kv_heads, self.head_size)
        return Workload(shape, causal=window is None, window=None if window is None else (window - 1, 0))


MODELS: Final = {
    "llama": Model("Llama 3.1 8B, 4 layers", 4096, 32, 8, 128, 14336, (None,) * 4, (5e5, 5e5)),
    "gemma": Model("Gemma 3 12B, 6 layers", 3840, 16, 8, 256, 15360, (1024,) * 5 + (None,), (1e4, 1e6), gemma=True),
    "small": Model("2 small layers", 64, 4, 2, 16, 128, (64, None), (1e4, 1e6), gemma=True),
}


def initial(model: Model) -> Weights:
    """Random weights, with a standard deviation of one over the square root of what a matrix sums over."""
    sizes = dict(zip("MNKHF", (model.width, model.heads, model.kv_heads, model.head_size, model.hidden), strict=True))

    def matrix(key: jax.Array, axes: str) -> jax.Array:
        summed = axes[:-1] if axes[-1] == "M" else "M"
        scale = functools.reduce(lambda product, axis: product * sizes[axis], summed, 1) ** -0.5
        return (scale * jax.random.normal(key, [sizes[axis] for axis in axes])).astype(jnp.bfloat16)

    def layer(key: jax.Array) -> dict[str, jax.Array]:
        return {
            name: matrix(key, axes) for (name, axes), key in zip(LAYER.items(), jax.random.split(key, 7), strict=True)
        }

    return [layer(key) for key in jax.random.split(jax.random.key(0), len(model.windows))]


def norm(x: Float[Array, "... H"]) -> Float[Array, "... H"]:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype)


def rotate(x: Float[Array, "B T N H"], theta: float) -> Float[Array, "B T N H"]:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None, None] * theta ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    rotated = a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)
    return jnp.concatenate(rotated, -1).astype(x.dtype)


def layer_of(model: Model, attend: Attention, theta: float) -> Callable[..., jax.Array]:
    """A layer as a function of its input and its weights."""
    gate = functools.partial(jax.nn.gelu, approximate=True) if model.gemma else jax.nn.silu
    also = norm if model.gemma else lambda x: x

    def layer(x: Float[Array, "B T M"], w: Mapping[str, jax.Array]) -> Float[Array, "B T M"]:
        normed = norm(x)
        query, key, value = (jnp.einsum("btm,mnh->btnh", normed, w[name]) for name in ("query", "key", "value"))
        seen = attend(rotate(also(query), theta), rotate(also(key), theta), value)
        x = x + also(jnp.einsum("btnh,nhm->btm", seen, w["out"]))
        normed = norm(x)
        return x + also((gate(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"])

    return layer


def step_of(model: Model, tokens: int, who: str, kept: str) -> Callable[..., Any]:
    """A step as a function of weights, input and cotangent. Returns new weights, the loss and a part of a gradient."""
    policy = None
    if kept == KEPT:
        policy = remat_policy() if who == OURS else lambda primitive, *_, **__: primitive.name in KERNELS
    rival = RIVALS[jax.default_backend()][who]
    layers = []
    for window in model.windows:
        attend = rival.make(model.workload(tokens, window), None)
        layers.append(jax.checkpoint(layer_of(model, attend, model.theta[window is None]), policy=policy))

    def loss_of(weights: Weights, x: jax.Array, dout: jax.Array) -> jax.Array:
        for layer, w in zip(layers, weights, strict=True):
            x = layer(x, w)
        return jnp.mean(norm(x).astype(jnp.float32) * dout)

    def step(weights: Weights, x: jax.Array, dout: jax.Array) -> tuple[Weights, jax.Array, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(weights, x, dout)
        return jax.tree.map(lambda w, g: w - RATE * g, weights, gradients), loss, gradients[0]["query"][:64]

    return step


def peak_bytes(program: jax.stages.Compiled) -> int:
    """The bytes that a program holds at its peak, its arguments included, as XLA plans it."""
    memory = program.memory_analysis()
    assert memory is not None, "XLA tells the memory of every program that it compiles"
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


def compare(model: Model, tokens: int, candidates: Sequence[tuple[str, str]], rounds: int) -> list[dict[str, Any]]:
    """A row for each candidate that can compute the model. Ends if one computes other gradients than the first."""
    x, dout = (jax.random.normal(jax.random.key(seed), (1, tokens, model.width)) for seed in (1, 2))
    x, state = x.astype(jnp.bfloat16), initial(model)
    programs: dict[str, Any] = {}
    rows: dict[str, dict[str, Any]] = {}
    for who, kept in candidates:
        rival = RIVALS[jax.default_backend()][who]
        problems = {rival.missing() or rival.why_not(model.workload(tokens, window)) for window in model.windows} - {
            None
        }
        if problems:
            print(f"{model.what}, {tokens} tokens: no {who}: {problems.pop()}", file=sys.stderr)
            continue
        name = f"{who}, {kept} kept"
        step = jax.jit(step_of(model, tokens, who, kept), donate_argnums=0)
        programs[name] = step.lower(state, x, dout).compile()
        rows[name] = {"model": model.what, "tokens": tokens, "attention": who, "kept": kept}
        rows[name] |= {"peak_GiB": peak_bytes(programs[name]) / 2**30}

    right = None
    for name, program in programs.items():
        state, loss, gradient = program(state, x, dout)
        right = gradient if right is None else right
        difference = relative(gradient, right)
        if not difference < TOLERANCE:
            raise SystemExit(f"{name}: gradients differ from those of the first by {difference:.2f}")
        rows[name] |= {"loss": float(loss), "difference": difference}

    def run(program: Callable[..., Any]) -> jax.Array:
        nonlocal state
        state, loss, _ = program(state, x, dout)
        return loss

    seconds = measured_rounds({name: functools.partial(run, program) for name, program in programs.items()}, rounds)
    for name, row in rows.items():
        row["seconds"] = seconds[name]
        row["tokens_per_second"] = tokens / statistics.median(seconds[name])
    return [*rows.values()]


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows in Markdown, each beside the first of its model and length."""
    lines = ["| model | tokens | attention | kept | tokens/s | of ours | peak, GiB |", "|---|---|---|---|---|---|---|"]
    first: dict[tuple[str, int], float] = {}
    for row in rows:
        rate = row["tokens_per_second"]
        share = rate / first.setdefault((row["model"], row["tokens"]), rate)
        cells = [row["model"], f"{row['tokens']:,}", row["attention"], row["kept"], f"{rate:,.0f}", f"{share:.2f}"]
        lines.append("| " + " | ".join([*cells, f"{row['peak_GiB']:.1f}"]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", choices=list(MODELS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[32768, 131072])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--as-written", action="store_true", help="leave out rivals whose results a policy keeps")
    parser.add_argument("--json", type=Path, help="also write the rows into this file, after each length")
    asked = parser.parse_args()
    platform = jax.default_backend()
    if platform not in CANDIDATES:
        raise SystemExit(f"this benchmark knows what to compare on a GPU and on a CPU, and JAX has a {platform} here")
    candidates = [x for x in CANDIDATES[platform] if not asked.as_written or x[0] == OURS or x[1] == NOTHING]
    rows: list[dict[str, Any]] = []
    written = {"script": "model_step.py", "jax": jax.__version__, "device": jax.devices()[0].device_kind, "rows": rows}
    for name in asked.models:
        for tokens in asked.tokens:
            found = compare(MODELS[name], tokens, candidates, asked.rounds)
            rows += found
            print(table(found), flush=True)
            jax.clear_caches()
            if asked.json:
                asked.json.write_text(json.dumps(written, indent=1))
    print(f"\nmodel_step.py: jax {written['jax']}, {written['device']}\n\n{table(rows)}\n\n{json.dumps(written)}")


if __name__ == "__main__":
    main()
