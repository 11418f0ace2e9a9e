# SPDX-License-Identifier: Apache-2.0
"""Trains a small Llama-like model on packed documents, over FSDP, tensor and sequence axes, with checkpoints.

    python train_long_context.py --cpu 8 --check  # two minutes on a laptop
    srun ... python train_long_context.py --distributed --checkpoints /shared/run --dtype bfloat16 --mesh 4,2,4

In every document the next token is a constant stride away, so the loss falls only if attention looks back, within the
document. `--check` trains again on one device, and exits with status 1 if a loss differs.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ringattn_core import remat_policy, ring_attention, ring_mesh, to_layout

# The axes of each parameter by letter: layers L, width M, heads N, key heads K, head size H, hidden F, vocabulary V.
BLOCK = {"query": "LMNH", "key": "LMKH", "value": "LMKH", "out": "LNHM", "gate": "LMF", "up": "LMF", "down": "LFM",
         "before": "LM", "between": "LM"}  # fmt: skip
PARAMETERS = BLOCK | {"token": "VM", "final": "M", "logits": "MV"}
# The mesh axis that splits an axis of the parameters. "fsdp" also splits the rows of the batch, and "sp" the tokens.
SPLIT = {"M": "fsdp", "N": "tp", "K": "tp", "F": "tp", "V": "tp"}
TOKENS = P("fsdp", "sp")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"steps": 40, "rows": 4, "length": 1024, "documents": 4, "layers": 4, "width": 128, "heads": 4,
             "key_heads": 2, "head_size": 32, "hidden": 384, "vocabulary": 64, "save_every": 20, "print_every": 10,
             "cpu": 0}  # fmt: skip
    for name, size in sizes.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=size, help=f"{size} by default")
    parser.add_argument("--mesh", default="2,2,2", help="ranks of fsdp,tp,sp; --cpu N makes N CPU devices for them")
    parser.add_argument("--layout", default="striped", help="the order of tokens; docs/choosing.md says which")
    parser.add_argument("--dtype", default="float32", help="the dtype of activations; parameters are float32")
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--checkpoints", help="a folder that all hosts share; without it nothing is saved")
    parser.add_argument("--distributed", nargs="?", const="", help="no value, or by hand HOST:PORT,PROCESSES,ID")
    parser.add_argument("--heartbeat", type=int, default=100, help="seconds after which a dead process ends the others")
    parser.add_argument("--check", nargs="?", const=1e-4, type=float, help="the largest difference; 1e-4 by default")
    return parser.parse_args()


def initial(a: argparse.Namespace) -> Any:
    """The parameters. The arrays of a block hold all layers on their first axis, for `scan`."""
    sizes = dict(
        zip("LMNKHFV", (a.layers, a.width, a.heads, a.key_heads, a.head_size, a.hidden, a.vocabulary), strict=True)
    )
    keys = jax.random.split(jax.random.key(0), len(PARAMETERS))

    def parameter(key: jax.Array, axes: str) -> jax.Array:
        shape = [sizes[axis] for axis in axes]
        return jnp.ones(shape) if axes in ("LM", "M") else jax.random.normal(key, shape) / a.width**0.5

    return {name: parameter(key, PARAMETERS[name]) for name, key in zip(PARAMETERS, keys, strict=True)}


def norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6) * weight).astype(x.dtype)


def rotate(x: jax.Array, positions: jax.Array) -> jax.Array:
    """RoPE by the position in the document: tokens need not be in natural order."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * 10000.0 ** (-jnp.arange(half) / half)
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    rotated = a * jnp.cos(angles) - b * jnp.sin(angles), a * jnp.sin(angles) + b * jnp.cos(angles)
    return jnp.concatenate(rotated, -1).astype(x.dtype)


def loss_of(a: argparse.Namespace, mesh: Mesh, parameters: Any, batch: dict[str, jax.Array]) -> jax.Array:
    """The mean loss of the tokens that have a next one in their document."""
    ring = {"mesh": mesh, "axis_name": "sp", "batch_axis_name": "fsdp", "head_axis_name": "tp", "layout": a.layout}
    split = functools.partial(jax.lax.with_sharding_constraint, shardings=NamedSharding(mesh, TOKENS))

    def block(x: jax.Array, weights: Any) -> tuple[jax.Array, None]:
        w = {name: weight.astype(x.dtype) for name, weight in weights.items()}
        normed = norm(x, w["before"])
        query, key, value = (jnp.einsum("btm,mnh->btnh", normed, w[name]) for name in ("query", "key", "value"))
        query, key = rotate(query, batch["positions"]), rotate(key, batch["positions"])
        seen = ring_attention(query, key, value, causal=True, q_segment_ids=batch["segments"], **ring)
        x = split(x + jnp.einsum("btnh,nhm->btm", seen, w["out"]))
        normed = norm(x, w["between"])
        return split(x + (jax.nn.silu(normed @ w["gate"]) * (normed @ w["up"])) @ w["down"]), None

    table = jax.lax.with_sharding_constraint(parameters["token"].astype(a.dtype), NamedSharding(mesh, P()))
    x = split(table[batch["tokens"]])
    # The policy keeps the output of attention, so that the backward pass does not run the ring a second time.
    checkpointed = jax.checkpoint(block, policy=remat_policy(), prevent_cse=False)
    x, _ = jax.lax.scan(checkpointed, x, {name: parameters[name] for name in BLOCK})
    logits = (norm(x, parameters["final"]) @ parameters["logits"].astype(x.dtype)).astype(jnp.float32)
    each = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(batch["labels"], 0))
    return jnp.mean(each, where=batch["labels"] >= 0)


@functools.lru_cache(maxsize=64)
def row(step: int, number: int, length: int, documents: int, vocabulary: int) -> dict[str, np.ndarray]:
    """Row `number` of a step, in natural order. It is random but fixed, so that a resumed run sees the same rows."""
    draw = np.random.default_rng((step, number))
    starts = np.append(0, np.sort(draw.choice(np.arange(1, length), documents - 1, replace=False)))
    segments = np.searchsorted(starts, np.arange(length), side="right") - 1
    positions = np.arange(length) - starts[segments]
    first, stride = draw.integers(0, vocabulary, documents), draw.integers(1, 5, documents)
    tokens = (first[segments] + stride[segments] * positions) % vocabulary
    labels = np.where(np.diff(segments, append=documents), -1, np.roll(tokens, -1))  # -1 after the last of a document
    found = {"tokens": tokens, "labels": labels, "segments": segments, "positions": positions}
    return {name: x.astype(np.int32) for name, x in found.items()}


def batch_of(a: argparse.Namespace, mesh: Mesh, step: int) -> dict[str, jax.Array]:
    """The batch of a step in layout order. Each process makes the rows and tokens of its own devices only."""
    order = to_layout(np.arange(a.length), a.layout, mesh.shape["sp"], axis=0)

    def array(name: str) -> jax.Array:
        def of_device(index: Any) -> np.ndarray:
            rows = [row(step, n, a.length, a.documents, a.vocabulary)[name] for n in range(a.rows)[index[0]]]
            return np.stack(rows)[:, order[index[1]]]

        return jax.make_array_from_callback((a.rows, a.length), NamedSharding(mesh, TOKENS), of_device)

    return {name: array(name) for name in ("tokens", "labels", "segments", "positions")}


def train(a: argparse.Namespace, mesh: Mesh, checkpoints: str | None, say: Callable[[str], None]) -> dict[int, float]:
    """Trains from the last checkpoint, or from the start. Returns the loss of each step that it ran."""
    schedule = optax.schedules.warmup_constant_schedule(0.0, a.rate, 10)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, eps=1e-6, weight_decay=0.01))

    def create() -> Any:
        parameters = initial(a)
        return {"parameters": parameters, "optimizer": optimizer.init(parameters)}

    def step_of(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(functools.partial(loss_of, a, mesh))(state["parameters"], batch)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["parameters"])
        return {"parameters": optax.apply_updates(state["parameters"], updates), "optimizer": moments}, loss

    placed = {name: NamedSharding(mesh, P(*map(SPLIT.get, axes))) for name, axes in PARAMETERS.items()}
    moments = optax.tree_utils.tree_map_params(
        optimizer, lambda _, place: place, jax.eval_shape(create)["optimizer"], placed,
        transform_non_params=lambda _: NamedSharding(mesh, P()),
    )  # fmt: skip
    places = {"parameters": placed, "optimizer": moments}
    state = jax.jit(create, out_shardings=places)()
    advance = jax.jit(step_of, donate_argnums=0, out_shardings=(places, None))
    begin, losses, saved = 0, {}, None
    if checkpoints:
        options = ocp.CheckpointManagerOptions(save_interval_steps=a.save_every, max_to_keep=3)
        saved = ocp.CheckpointManager(checkpoints, options=options)
        if begin := saved.latest_step() or 0:
            state = saved.restore(begin, args=ocp.args.StandardRestore(state))
            say(f"resumed after step {begin}")
    since, clock = begin, time.perf_counter()
    for step in range(begin + 1, a.steps + 1):
        state, losses[step] = advance(state, batch_of(a, mesh, step))
        if step % a.print_every == 0 or step == a.steps:
            value, now = float(losses[step]), time.perf_counter()  # waits for the device
            rate, since, clock = (step - since) * a.rows * a.length / (now - clock), step, now
            say(f"step {step}/{a.steps}  loss {value:.6f}  {rate:,.0f} tokens/s")
        if saved:
            saved.save(step, args=ocp.args.StandardSave(state), force=step == a.steps)
            if saved.reached_preemption(step):
                break  # the scheduler sent SIGTERM, so orbax has saved this step
    if saved:
        saved.close()  # waits for what is being written
    return {step: float(loss) for step, loss in losses.items()}


def main() -> None:
    a = parse()
    if a.cpu:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", a.cpu)
    if a.distributed is not None:
        named: Any = [int(part) if part.isdigit() else part or None for part in a.distributed.split(",")]
        jax.distributed.initialize(*named, heartbeat_timeout_seconds=a.heartbeat, shutdown_timeout_seconds=a.heartbeat)
    say = functools.partial(print, flush=True) if jax.process_index() == 0 else lambda _: None
    sizes: dict[str, int] = dict(zip(("fsdp", "tp", "sp"), map(int, a.mesh.split(",")), strict=True))
    losses = train(a, ring_mesh(axis_sizes=sizes), a.checkpoints, say)
    if a.check:
        alone = train(a, ring_mesh(jax.local_devices()[:1], axis_sizes=dict.fromkeys(sizes, 1)), None, lambda _: None)
        worst = max((abs(loss - alone[step]) for step, loss in losses.items()), default=0.0)
        if not worst <= a.check:
            raise SystemExit(f"The losses differ from those of one device by {worst:.1e}, more than {a.check}.")
        say(f"Every loss equals that of one device: the largest difference is {worst:.0e}.")


if __name__ == "__main__":
    main()
