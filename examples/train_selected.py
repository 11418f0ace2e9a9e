# SPDX-License-Identifier: Apache-2.0
"""Trains a small model of text whose indexer learns to choose blocks of keys, on a ring of CPU devices.

    python train_selected.py --out build/selected        # minutes on two cores

First attention is dense, and `teach` trains the indexer on all keys that a query sees. From that model two runs go on:
one stays dense; the other attends to the blocks that the indexer chooses, where `teach` looks at these blocks alone.
The text is Python's standard library. The folder `--out` gets the curves as `curves.png`, the losses as `run.json`, and
`choices.npy`: what the indexer chooses in a held-out document, int32 `[T, layers * groups, COUNT]`.
"""

import argparse
import functools
import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
import text_corpus
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int32
from ringattn_core import from_layout, ring_attention, ring_mesh, to_layout
from ringattn_sparse import select, teach
from text_corpus import VOCABULARY
from text_model import norm, rotate

LAYERS, WIDTH, HEADS, GROUPS, SIZE, HIDDEN = 2, 64, 4, 2, 16, 192
INDEX_HEADS, INDEX = 4, 16
COUNT, BLOCK = 8, 8
ROWS, RATE, LAYOUT = 2, 3e-3, "zigzag"
SMOOTH = 10
KINDS = ("dense", "chosen blocks")
SHAPES = {
    "query": (WIDTH, HEADS, SIZE), "key": (WIDTH, GROUPS, SIZE), "value": (WIDTH, GROUPS, SIZE),
    "out": (HEADS, SIZE, WIDTH), "gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH),
    "index_query": (WIDTH, INDEX_HEADS, INDEX), "index_key": (WIDTH, 1, INDEX), "index_weight": (WIDTH, INDEX_HEADS),
}  # fmt: skip
Weights = dict[str, Any]


def initial() -> Weights:
    shapes = {name: (LAYERS, *shape) for name, shape in SHAPES.items()}
    shapes |= {"token": (VOCABULARY, WIDTH), "logits": (WIDTH, VOCABULARY)}
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return {name: jax.random.normal(key, shapes[name]) / WIDTH**0.5 for name, key in zip(shapes, keys, strict=True)}


def attend(
    kind: str, w: Weights, x: Float[Array, "B T M"], positions: Int32[Array, "B T"], ring: dict[str, Any]
) -> tuple[Float[Array, "B T N H"], Float[Array, ""], Any]:
    """The output of attention of a kind, the loss of the indexer, and the ids of the blocks."""
    query, key, value = (jnp.einsum("btm,mnh->btnh", x, w[name]) for name in ("query", "key", "value"))
    query, key = rotate(query, positions), rotate(key, positions)
    # The loss of the indexer trains the indexer only, and the loss of the model all but the indexer.
    x = jax.lax.stop_gradient(x)
    index_query, index_key = (jnp.einsum("btm,mnh->btnh", x, w[name]) for name in ("index_query", "index_key"))
    index = rotate(index_query, positions) * INDEX**-0.5, rotate(index_key, positions)[:, :, 0], x @ w["index_weight"]
    options: dict[str, Any] = {}
    if kind == "chosen blocks":
        options["selected"] = select(*index, count=COUNT, size=BLOCK, groups=GROUPS, forced=(0, 1), causal=True, **ring)
        options["selected_size"] = BLOCK
    out, lse = ring_attention(query, key, value, causal=True, return_lse=True, **options, **ring)
    loss = teach(*index, query, key, lse, groups=GROUPS, causal=True, **options, **ring)
    return out, loss, options.get("selected")


def forward(
    kind: str, ring: dict[str, Any], weights: Weights, row: dict[str, jax.Array]
) -> tuple[Float[Array, ""], Float[Array, ""], Any]:
    """The mean loss of a byte, the mean loss of the indexers, and the ids of all layers."""

    def block(x: Float[Array, "B T M"], w: Weights) -> tuple[Float[Array, "B T M"], Any]:
        normed = norm(x, jnp.ones(WIDTH))
        out, taught, ids = attend(kind, w, normed, row["positions"], ring)
        x = x + jnp.einsum("btnh,nhm->btm", out, w["out"])
        normed = norm(x, jnp.ones(WIDTH))
        return x + (jax.nn.silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"], (taught, ids)

    x, (taught, ids) = jax.lax.scan(block, weights["token"][row["tokens"]], {name: weights[name] for name in SHAPES})
    logits = norm(x, jnp.ones(WIDTH)) @ weights["logits"]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(row["labels"], 0))
    real = row["labels"] >= 0
    return jnp.where(real, losses, 0).sum() / real.sum(), taught.mean(), ids


class Trainer:
    """Trains on rows of text over a ring. `advance` and `evaluate` are compiled once for each kind of attention."""

    def __init__(self, length: int):
        self.mesh = ring_mesh()
        self.ring = {"mesh": self.mesh, "axis_name": "sp", "layout": LAYOUT}
        self.length, self.optimizer = length, optax.adam(RATE)
        self.corpus = text_corpus.read(None, ROWS * length)

    def batch(self, rows: list[text_corpus.Row]) -> dict[str, jax.Array]:
        place = NamedSharding(self.mesh, P(None, "sp"))
        stacked = {name: np.stack([row[name] for row in rows]) for name in ("tokens", "labels", "positions")}
        return {name: jax.device_put(to_layout(x, LAYOUT, self.mesh.size), place) for name, x in stacked.items()}

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def advance(self, kind: str, weights: Weights, state: Any, batch: dict[str, jax.Array]) -> Any:
        def loss(weights: Weights) -> tuple[jax.Array, Any]:
            text, taught, _ = forward(kind, self.ring, weights, batch)
            return text + taught, (text, taught)

        gradients, losses = jax.grad(loss, has_aux=True)(weights)
        updates, state = self.optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, losses

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def evaluate(self, kind: str, weights: Weights, batch: dict[str, jax.Array]) -> Any:
        return forward(kind, self.ring, weights, batch)

    def train(self, kind: str, weights: Weights, state: Any, steps: range) -> tuple[Weights, Any, list[list[float]]]:
        """The weights and the state after these steps, and the losses of each: of the text, and of the indexer."""
        found, start = [], time.perf_counter()
        for step in steps:
            rows = [self.corpus.row(step * ROWS + n, self.length, joined=True) for n in range(ROWS)]
            weights, state, losses = self.advance(kind, weights, state, self.batch(rows))
            found.append([float(x) for x in losses])
            if step == steps[-1] or step % 20 == 0:
                seconds = (time.perf_counter() - start) / len(found)
                text, taught = found[-1]
                print(f"{kind}, step {step}: loss {text:.4f}, indexer {taught:.4f}, {seconds:.2f} s a step", flush=True)
        return weights, state, found

    def held_out(self, kind: str, weights: Weights, count: int) -> tuple[float, Any]:
        """The mean loss of held-out documents, and the ids `[T, layers * GROUPS, COUNT]` in the first."""
        rows = self.corpus.evaluation(self.length, count)
        found = [self.evaluate(kind, weights, self.batch(rows[n : n + ROWS])) for n in range(0, count, ROWS)]
        ids = found[0][2]
        if ids is not None:
            ids = np.concatenate(from_layout(ids[:, 0], LAYOUT, self.mesh.size), 1)
        return float(np.mean([loss for loss, _, _ in found])), ids


def draw(run: dict[str, Any], path: Path) -> None:
    """Curves of both losses, averaged over `SMOOTH` steps."""
    figure = matplotlib.figure.Figure(figsize=(9.6, 3.8), layout="constrained")
    panels = figure.subplots(1, 2)
    for name, losses in run["losses"].items():
        for panel, curve in zip(panels, np.transpose([*run["before"], *losses]), strict=True):
            mean = np.convolve(curve, np.ones(SMOOTH) / SMOOTH, "valid")
            steps = SMOOTH - 1 + np.arange(len(mean))
            shown = steps >= (0 if name == "dense" else len(run["before"]))
            panel.plot(steps[shown], mean[shown], label=name)
    panels[0].set(xlabel="step", ylabel="nats a byte", title="Loss of the text")
    panels[1].set(xlabel="step", ylabel="nats", title="Loss of the indexer")
    for panel in panels:
        panel.axvline(len(run["before"]), color="0.8", linewidth=0.8)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(frameon=False)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=8, help="the ranks of the ring")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--before", type=int, default=80, help="steps of dense attention, before the choice")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run after it")
    parser.add_argument("--held-out", type=int, default=8, help="documents")
    parser.add_argument("--out", type=Path, default=Path("build/selected"))
    a = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", a.devices)
    trainer = Trainer(a.length)
    weights = initial()
    weights, state, before = trainer.train("dense", weights, trainer.optimizer.init(weights), range(a.before))
    run: dict[str, Any] = {"before": before, "losses": {}, "held out": {}}
    a.out.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        trained, _, run["losses"][kind] = trainer.train(kind, weights, state, range(a.before, a.before + a.steps))
        run["held out"][kind], ids = trainer.held_out(kind, trained, a.held_out)
        mean = np.mean(run["losses"][kind], 0)[0]
        print(f"{kind}: {mean:.3f} nats a byte in these steps, {run['held out'][kind]:.3f} held out", flush=True)
        if kind == "chosen blocks":
            np.save(a.out / "choices.npy", ids)
    (a.out / "run.json").write_text(json.dumps(run))
    draw(run, a.out / "curves.png")


if __name__ == "__main__":
    main()
