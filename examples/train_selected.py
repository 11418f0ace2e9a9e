# SPDX-License-Identifier: Apache-2.0
"""Trains a small model of text whose indexer learns to choose blocks of keys.

    python train_selected.py                             # a ring of 8 CPU devices: minutes on two cores
    python train_selected.py --preset 32k --cpu 0        # 32,768 bytes of context, on a ring of the GPUs there are

First attention is dense, and `teach` trains the indexer on all keys that a query sees. From that model two runs go on:
one stays dense; the other attends to the blocks that the indexer chooses, where `teach` looks at these blocks alone.
The text is Python's standard library. The folder `--out` gets the curves as `curves.png`, the losses as `run.json`, and
`choices-T.npy` for each length `T` of `--choices`: what the indexers choose in held-out text, int32
`[T, layers * groups, blocks]`.
"""

import argparse
import dataclasses
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

LAYOUT = "zigzag"
SMOOTH = 10
KINDS = ("dense", "chosen blocks")
Weights = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Sizes:
    length: int
    layers: int
    width: int
    heads: int
    groups: int
    """The key heads; each has a choice of its own."""
    head_size: int
    hidden: int
    index_heads: int
    index_size: int
    """Of an index head."""
    blocks: int
    """So many a query chooses."""
    block_size: int
    rows: int
    """Of a batch."""
    rate: float
    before: int
    """Steps of dense attention, before the choice."""
    steps: int
    """Steps of each run after it."""
    dtype: str
    """Of activations; weights are float32."""

    def of_layers(self) -> dict[str, tuple[int, ...]]:
        """The shape of each weight of a layer."""
        width, index_heads = self.width, self.index_heads
        return {
            "query": (width, self.heads, self.head_size), "key": (width, self.groups, self.head_size),
            "value": (width, self.groups, self.head_size), "out": (self.heads, self.head_size, width),
            "gate": (width, self.hidden), "up": (width, self.hidden), "down": (self.hidden, width),
            "index_query": (width, index_heads, self.index_size), "index_key": (width, 1, self.index_size),
            "index_weight": (width, index_heads),
        }  # fmt: skip

    def initial(self) -> Weights:
        shapes = {name: (self.layers, *shape) for name, shape in self.of_layers().items()}
        shapes |= {"token": (VOCABULARY, self.width), "logits": (self.width, VOCABULARY)}
        keys = jax.random.split(jax.random.key(0), len(shapes))
        drawn = {name: jax.random.normal(key, shape) for key, (name, shape) in zip(keys, shapes.items(), strict=True)}
        return {name: x / self.width**0.5 for name, x in drawn.items()}


PRESETS = {
    "small": Sizes(
        length=512, layers=2, width=64, heads=4, groups=2, head_size=16, hidden=192, index_heads=4, index_size=16,
        blocks=8, block_size=8, rows=2, rate=3e-3, before=80, steps=60, dtype="float32",
    ),
    "32k": Sizes(
        length=32768, layers=4, width=512, heads=16, groups=4, head_size=64, hidden=1536, index_heads=8, index_size=64,
        blocks=16, block_size=128, rows=1, rate=1e-3, before=200, steps=120, dtype="bfloat16",
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Model:
    sizes: Sizes
    ring: dict[str, Any]

    def attend(
        self, kind: str, w: Weights, x: Float[Array, "B T M"], positions: Int32[Array, "B T"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, ""], Any]:
        """The output of attention of a kind, the loss of the indexer, and the ids of the blocks."""
        sizes, ring = self.sizes, self.ring
        query, key, value = (jnp.einsum("btm,mnh->btnh", x, w[name]) for name in ("query", "key", "value"))
        query, key = rotate(query, positions), rotate(key, positions)
        # The loss of the indexer trains the indexer only, and the loss of the model all but the indexer.
        x = jax.lax.stop_gradient(x)
        index_query, index_key = (jnp.einsum("btm,mnh->btnh", x, w[name]) for name in ("index_query", "index_key"))
        index_query, index_key = rotate(index_query, positions), rotate(index_key, positions)[:, :, 0]
        index = index_query * sizes.index_size**-0.5, index_key, x @ w["index_weight"]
        options: dict[str, Any] = {}
        if kind == "chosen blocks":
            choice = {"count": sizes.blocks, "size": sizes.block_size, "groups": sizes.groups, "forced": (0, 1)}
            options["selected"] = select(*index, causal=True, **choice, **ring)
            options["selected_size"] = sizes.block_size
        out, lse = ring_attention(query, key, value, causal=True, return_lse=True, **options, **ring)
        loss = teach(*index, query, key, lse, groups=sizes.groups, causal=True, **options, **ring)
        return out, loss, options.get("selected")

    def __call__(
        self, kind: str, weights: Weights, batch: dict[str, jax.Array]
    ) -> tuple[Float[Array, ""], Float[Array, ""], Any]:
        """The mean loss of a byte, the mean loss of the indexers, and the ids of all layers."""

        def layer(x: Float[Array, "B T M"], w: Weights) -> tuple[Float[Array, "B T M"], Any]:
            w = {name: weight.astype(x.dtype) for name, weight in w.items()}
            normed = norm(x, jnp.ones(x.shape[-1]))
            out, taught, ids = self.attend(kind, w, normed, batch["positions"])
            x = x + jnp.einsum("btnh,nhm->btm", out, w["out"])
            normed = norm(x, jnp.ones(x.shape[-1]))
            return x + (jax.nn.silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"], (taught, ids)

        x = weights["token"][batch["tokens"]].astype(self.sizes.dtype)
        x, (taught, ids) = jax.lax.scan(layer, x, {name: weights[name] for name in self.sizes.of_layers()})
        table = weights["logits"].astype(x.dtype)
        logits = jnp.matmul(norm(x, jnp.ones(x.shape[-1])), table, preferred_element_type=jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["labels"], 0))
        real = batch["labels"] >= 0
        return jnp.where(real, losses, 0).sum() / real.sum(), taught.mean(), ids


class Trainer:
    """Trains on rows of text over a ring. `advance` and `evaluate` are compiled once for each kind and length."""

    def __init__(self, sizes: Sizes, longest: int):
        self.mesh, self.sizes = ring_mesh(), sizes
        self.model = Model(sizes, {"mesh": self.mesh, "axis_name": "sp", "layout": LAYOUT})
        self.optimizer = optax.adam(sizes.rate)
        self.corpus = text_corpus.read(None, sizes.rows * sizes.length)
        self.held_out = dataclasses.replace(self.corpus, training=self.corpus.held_out)
        if self.held_out.size <= longest:
            raise SystemExit(f"The held-out text has {self.held_out.size:,} bytes: --length and --choices take fewer.")

    def batch(self, rows: list[text_corpus.Row]) -> dict[str, jax.Array]:
        place = NamedSharding(self.mesh, P(None, "sp"))
        stacked = {name: np.stack([row[name] for row in rows]) for name in ("tokens", "labels", "positions")}
        return {name: jax.device_put(to_layout(x, LAYOUT, self.mesh.size), place) for name, x in stacked.items()}

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def advance(self, kind: str, weights: Weights, state: Any, batch: dict[str, jax.Array]) -> Any:
        def loss(weights: Weights) -> tuple[jax.Array, Any]:
            text, taught, _ = self.model(kind, weights, batch)
            return text + taught, (text, taught)

        gradients, losses = jax.grad(loss, has_aux=True)(weights)
        updates, state = self.optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, losses

    @functools.partial(jax.jit, static_argnums=(0, 1))
    def evaluate(self, kind: str, weights: Weights, batch: dict[str, jax.Array]) -> tuple[Float[Array, ""], Any]:
        """The mean loss of a byte, and the ids of all layers."""
        text, _, ids = self.model(kind, weights, batch)
        return text, ids

    def train(self, kind: str, weights: Weights, state: Any, steps: range) -> tuple[Weights, Any, list[list[float]]]:
        """The weights and the state after these steps, and the losses of each: of the text, and of the indexer."""
        found, start = [], time.perf_counter()
        for step in steps:
            numbers = range(step * self.sizes.rows, (step + 1) * self.sizes.rows)
            rows = [self.corpus.row(number, self.sizes.length, joined=True) for number in numbers]
            weights, state, losses = self.advance(kind, weights, state, self.batch(rows))
            found.append([float(x) for x in losses])
            if step == steps[-1] or step % 20 == 0:
                seconds = (time.perf_counter() - start) / len(found)
                text, taught = found[-1]
                print(f"{kind}, step {step}: loss {text:.4f}, indexer {taught:.4f}, {seconds:.2f} s a step", flush=True)
        return weights, state, found

    def loss(self, kind: str, weights: Weights, rows: int) -> float:
        """The mean loss of a byte of held-out text."""
        found = [self.evaluate(kind, weights, self.batch([self.unseen(n, self.sizes.length)]))[0] for n in range(rows)]
        return float(np.mean(found))

    def choices(self, weights: Weights, length: int) -> Int32[np.ndarray, "T choices n"]:
        """The blocks that the indexers of all layers choose in the first row of held-out text."""
        _, ids = self.evaluate(KINDS[1], weights, self.batch([self.unseen(0, length)]))
        return np.concatenate(from_layout(np.asarray(ids)[:, 0], LAYOUT, self.mesh.size), 1)

    def unseen(self, number: int, length: int) -> text_corpus.Row:
        return self.held_out.row(number, length, joined=True)


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
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument("--cpu", type=int, default=8, help="the CPU devices of the ring; 0: the devices there are")
    for name in ("length", "before", "steps"):
        parser.add_argument(f"--{name}", type=int, help="in place of the preset's")
    parser.add_argument("--held-out", type=int, default=8, help="rows of held-out text")
    parser.add_argument("--choices", type=int, nargs="*", help="lengths; by default that of training")
    parser.add_argument("--out", type=Path, default=Path("build/selected"))
    a = parser.parse_args()
    if a.cpu:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", a.cpu)
    given = {name: getattr(a, name) for name in ("length", "before", "steps") if getattr(a, name) is not None}
    sizes = dataclasses.replace(PRESETS[a.preset], **given)
    lengths = [sizes.length] if a.choices is None else a.choices
    trainer, weights = Trainer(sizes, max(sizes.length, *lengths)), sizes.initial()
    weights, state, before = trainer.train("dense", weights, trainer.optimizer.init(weights), range(sizes.before))
    run: dict[str, Any] = {"before": before, "losses": {}, "held out": {}}
    a.out.mkdir(parents=True, exist_ok=True)
    for kind in KINDS:
        steps = range(sizes.before, sizes.before + sizes.steps)
        trained, _, run["losses"][kind] = trainer.train(kind, weights, state, steps)
        run["held out"][kind] = trainer.loss(kind, trained, a.held_out)
        mean = np.mean(run["losses"][kind], 0)[0]
        print(f"{kind}: {mean:.3f} nats a byte in these steps, {run['held out'][kind]:.3f} held out", flush=True)
        for length in lengths if kind == KINDS[1] else ():
            np.save(a.out / f"choices-{length}.npy", trainer.choices(trained, length))
    (a.out / "run.json").write_text(json.dumps(run))
    draw(run, a.out / "curves.png")


if __name__ == "__main__":
    main()
