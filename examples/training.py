# SPDX-License-Identifier: Apache-2.0
"""The task of the training examples, and their check: each loss on a mesh of 8 devices equals that on one device.

Tokens of a sequence increase by a constant stride, one of four, so the loss falls below log 4 only if the model looks
back. The mesh is 2 x 4, data by sequence. The sequence is put in zigzag order once, where the batch is made.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32
from ringattn_core import to_layout

STRIDES = 4
VOCABULARY, LENGTH, WIDTH, HEADS, BLOCKS = 32, 64, 32, 4, 2
BATCH, STEPS, RATE = 8, 40, 1e-2
DATA, RING, LAYOUT = 2, 4, "zigzag"
TOLERANCE = 1e-4
FLOOR = math.log(STRIDES)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Tokens, the token after each, and the position of each in its sequence; all in layout order."""

    tokens: Int32[Array, "B T"]
    targets: Int32[Array, "B T"]
    positions: Int32[Array, "B T"]


Loss = Callable[[Any, Batch], jax.Array]
Model = Callable[[dict[str, Any]], tuple[Any, Loss]]
"""A function from the ring options (empty on one device) to the initial parameters, a pytree, and the loss."""


def cross_entropy(logits: Float[Array, "B T V"], targets: Int32[Array, "B T"]) -> Float[Array, ""]:
    """The mean over all tokens, which does not depend on their order."""
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
    return -jnp.mean(picked)


def batches() -> Iterator[Batch]:
    """New sequences for every step, the same in every run, in natural order."""
    draw = np.random.default_rng(0)
    for _ in range(STEPS):
        start, stride = draw.integers(0, VOCABULARY, (BATCH, 1)), draw.integers(1, STRIDES + 1, (BATCH, 1))
        tokens = ((start + stride * np.arange(LENGTH + 1)) % VOCABULARY).astype(np.int32)
        positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (BATCH, LENGTH))
        yield Batch(*map(jnp.asarray, (tokens[:, :-1], tokens[:, 1:], positions)))


def adam(parameters: Any, gradients: Any, state: Any, count: jax.Array) -> tuple[Any, Any]:
    """One step of Adam. The state is a pair: the running averages of the gradients and of their squares."""
    means = jax.tree.map(lambda mean, g: 0.9 * mean + 0.1 * g, state[0], gradients)
    squares = jax.tree.map(lambda square, g: 0.99 * square + 0.01 * g * g, state[1], gradients)

    def move(x: jax.Array, mean: jax.Array, square: jax.Array) -> jax.Array:
        return x - RATE * (mean / (1 - 0.9**count)) / (jnp.sqrt(square / (1 - 0.99**count)) + 1e-6)

    return jax.tree.map(move, parameters, means, squares), (means, squares)


def losses(model: Model, mesh: Mesh | None) -> list[float]:
    """The loss at every step, before its update."""
    ring = {} if mesh is None else {"mesh": mesh, "axis_name": "sp", "layout": LAYOUT}
    parameters, loss = model(ring)
    state = (jax.tree.map(jnp.zeros_like, parameters),) * 2

    @jax.jit
    def step(parameters: Any, state: Any, count: jax.Array, batch: Batch) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(parameters, batch)
        return *adam(parameters, gradients, state, count), value

    def placed(batch: Batch) -> Batch:
        if mesh is None:
            return batch
        laid_out = jax.tree.map(lambda x: to_layout(x, LAYOUT, RING), batch)
        return jax.device_put(laid_out, NamedSharding(mesh, PartitionSpec("data", "sp")))

    if mesh is not None:
        parameters, state = jax.device_put((parameters, state), NamedSharding(mesh, PartitionSpec()))
    found = []
    for count, batch in enumerate(batches(), 1):
        parameters, state, value = step(parameters, state, jnp.float32(count), placed(batch))
        found.append(float(value))
    return found


def judge(name: str, alone: list[float], spread: list[float]) -> str:
    """The verdict, a sentence. Exits with status 1 if the losses differ between mesh and device, or do not fall."""
    worst = np.max(np.abs(np.subtract(alone, spread)))
    if not worst <= TOLERANCE:
        raise SystemExit(f"{name}: the losses differ from those of one device by {worst:.1e}, more than {TOLERANCE}.")
    if not spread[-1] < FLOOR:
        raise SystemExit(f"{name}: the loss ends at {spread[-1]:.4f}, not below {FLOOR:.4f}: it does not look back.")
    return (
        f"{name}: the loss falls from {spread[0]:.4f} to {spread[-1]:.4f} on a {DATA} x {RING} mesh, "
        f"and equals that of one device: the largest difference is {worst:.0e}."
    )


def main(name: str, model: Model) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DATA * RING)
    mesh = Mesh(np.array(jax.devices()).reshape(DATA, RING), ("data", "sp"))
    runs = []
    for where, devices in (("one device", None), (f"{DATA} x {RING} mesh", mesh)):
        start = time.perf_counter()
        runs.append(losses(model, devices))
        print(f"{where}: {STEPS} steps in {time.perf_counter() - start:.1f} s")
    print("step  one device  mesh")
    for step in range(0, STEPS, 5):
        print(f"{step:4}  {runs[0][step]:10.6f}  {runs[1][step]:.6f}")
    print(judge(name, *runs))
