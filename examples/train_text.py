# SPDX-License-Identifier: Apache-2.0
"""Trains a small Llama-like model on text, byte by byte, over FSDP, tensor and sequence axes, with checkpoints.

    python train_text.py --cpu 8 --check                 # two minutes on two cores; every loss equals one device's
    python train_text.py --preset 124M                   # on one GPU: 32,768 bytes of context, 1,000 steps
    srun ... python train_text.py --preset 124M --distributed --checkpoints /shared/run --mesh 4,2,4

The text is Python's standard library, or `--data` names a folder or file. Documents are packed, and do not see each
other unless `--joined`. The folder `--out` gets `run.json`, the curves as `curves.png`, and `sample.txt`.
`--checkpoints` saves, and resumes from what it finds: a run that was stopped then has the same losses bit for bit; on
GPUs with XLA_FLAGS=--xla_gpu_deterministic_ops=true, since without it their runs differ in the last bits.
`--check` trains again on one device, and exits with status 1 if a loss differs.
"""

import argparse
import dataclasses
import functools
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import text_corpus
import text_curves
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from ringattn_core import ring_mesh, to_layout
from text_model import ATTENTIONS, PARAMETERS, SPLIT, TOKENS, Batch, Model, sample

SMALL = {"steps": 40, "rows": 4, "length": 1024, "layers": 2, "width": 128, "heads": 4, "key_heads": 2, "head_size": 32,
         "hidden": 384, "rate": 3e-3, "warmup": 10, "dtype": "float32", "mesh": "2,2,2"}  # fmt: skip
PRESETS = {
    "small": SMALL,
    "124M": {"steps": 1000, "rows": 1, "length": 32768, "layers": 12, "width": 768, "heads": 12, "key_heads": 12,
             "head_size": 64, "hidden": 3456, "rate": 6e-4, "warmup": 100, "dtype": "bfloat16", "mesh": "1,1,1"},
}  # fmt: skip
BUCKETS = 32
"""The number of parts of the context; the loss of held-out documents is averaged in each."""
Losses = dict[int, float]
"""The loss of each step."""


@dataclasses.dataclass
class Result:
    """What a run found out, beside its losses."""

    losses: Losses
    rates: list[float] = dataclasses.field(default_factory=list)
    """Tokens a second, between progress lines."""
    positions: list[tuple[int, float | None]] = dataclasses.field(default_factory=list)
    """The first position of each bucket, and the mean loss there; `None` where no held-out document is so long."""
    text: bytes = b""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="small", help="sizes that the options below change")
    for name, value in SMALL.items():
        what = "ranks of fsdp,tp,sp; " if name == "mesh" else ""
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), help=f"{what}{value} for small")
    parser.add_argument("--data", type=Path, help="a folder or file of text; Python's standard library by default")
    parser.add_argument("--layout", default="striped", help="the order of tokens; docs/choosing.md says which")
    parser.add_argument("--attention", choices=ATTENTIONS, default="ring", help="or jax.nn's, on one device a sequence")
    parser.add_argument("--joined", action="store_true", help="documents of a row see each other")
    parser.add_argument("--remat", action=argparse.BooleanOptionalAction, default=True, help="compute layers again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", type=int, default=0, help="run on so many CPU devices")
    parser.add_argument("--out", type=Path, default=Path("build/text"), help="the folder of the results")
    parser.add_argument("--sample", type=int, default=200, help="the bytes of text to write at the end")
    parser.add_argument("--print-every", type=int, default=10)
    parser.add_argument("--save-every", type=int, default=20)
    parser.add_argument("--checkpoints", type=Path, help="a folder that all hosts share; without it nothing is saved")
    parser.add_argument("--distributed", nargs="?", const="", help="no value, or by hand HOST:PORT,PROCESSES,ID")
    parser.add_argument("--heartbeat", type=int, default=100, help="seconds after which a dead process ends the others")
    parser.add_argument("--check", nargs="?", const=1e-4, type=float, help="the largest difference; 1e-4 by default")
    a = parser.parse_args()
    for name, value in PRESETS[a.preset].items():
        if getattr(a, name) is None:
            setattr(a, name, value)
    if a.attention != "ring" and (not a.joined or not a.mesh.endswith(",1")):
        parser.error(f"--attention {a.attention} takes no documents and no ring: add --joined and --mesh F,T,1")
    return a


def batch_of(mesh: Mesh, layout: str, rows: Callable[[int], text_corpus.Row], shape: tuple[int, int]) -> Batch:
    """A batch in layout order. Each process makes the rows and tokens of its own devices only."""
    order = to_layout(np.arange(shape[1]), layout, mesh.shape["sp"], axis=0)
    row = functools.cache(rows)

    def array(name: str) -> jax.Array:
        def of_device(index: Any) -> np.ndarray:
            return np.stack([row(n)[name][order[index[1]]] for n in range(shape[0])[index[0]]])

        return jax.make_array_from_callback(shape, NamedSharding(mesh, TOKENS), of_device)

    return {name: array(name) for name in ("tokens", "labels", "segments", "positions")}


def memory() -> str:
    """The peak memory of this process's first device, or of the process where its devices do not tell."""
    peak = (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    kibibytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss if peak is None else peak / 1024
    return f"{kibibytes / 2**20:.1f} GiB"


def train(a: argparse.Namespace, corpus: text_corpus.Corpus, mesh: Mesh, say: Callable[[str], None] | None) -> Result:
    """Trains from the last checkpoint, or from the start. Without `say` it neither prints, saves nor evaluates."""
    model = Model(**{field.name: getattr(a, field.name) for field in dataclasses.fields(Model)})
    schedule = optax.schedules.warmup_constant_schedule(0.0, a.rate, a.warmup)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95, eps=1e-6, weight_decay=0.01))

    def create() -> Any:
        parameters = model.initial(a.seed)
        return {
            "parameters": parameters,
            "optimizer": optimizer.init(parameters),
            "corpus": jnp.int32(corpus.fingerprint),
        }

    def step_of(state: Any, batch: Batch) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(functools.partial(model.loss, mesh))(state["parameters"], batch)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["parameters"])
        return state | {"parameters": optax.apply_updates(state["parameters"], updates), "optimizer": moments}, loss

    placed = {name: NamedSharding(mesh, P(*map(SPLIT.get, axes))) for name, axes in PARAMETERS.items()}
    whole = NamedSharding(mesh, P())
    moments = optax.tree_utils.tree_map_params(
        optimizer, lambda _, place: place, jax.eval_shape(create)["optimizer"], placed,
        transform_non_params=lambda _: whole,
    )  # fmt: skip
    places = {"parameters": placed, "optimizer": moments, "corpus": whole}
    state = jax.jit(create, out_shardings=places)()
    advance = jax.jit(step_of, donate_argnums=0, out_shardings=(places, None))
    begin, saved, result = 0, None, Result({})
    if say and a.checkpoints:
        options = ocp.CheckpointManagerOptions(save_interval_steps=a.save_every, max_to_keep=3)
        saved = ocp.CheckpointManager(a.checkpoints.absolute(), options=options)
        if begin := saved.latest_step() or 0:
            state = saved.restore(begin, args=ocp.args.StandardRestore(state))
            if int(state["corpus"]) != corpus.fingerprint:
                raise SystemExit(f"{a.checkpoints} belongs to another corpus or seed: name another folder.")
            say(f"resumed after step {begin}")

    def batch(step: int) -> Batch:
        first = (step - 1) * a.rows
        rows = functools.partial(corpus.row, length=a.length, joined=a.joined)
        return batch_of(mesh, a.layout, lambda n: rows(first + n), (a.rows, a.length))

    waiting: dict[int, jax.Array] = {}
    since, clock = begin, time.perf_counter()
    for step in range(begin + 1, a.steps + 1):
        state, waiting[step] = advance(state, batch(step))
        if step in (begin + 1, a.steps) or step % a.print_every == 0:
            result.losses |= {number: float(loss) for number, loss in waiting.items()}  # waits for the device
            waiting.clear()
            now = time.perf_counter()
            rate, since, clock = (step - since) * a.rows * a.length / (now - clock), step, now
            result.rates += [rate] if step > begin + 1 else []  # the first step compiles
            if say and jax.process_index() == 0:
                record(a, result)
                left = f"{(a.steps - step) * a.rows * a.length / rate:,.0f} s left"
                say(f"step {step}/{a.steps}  loss {result.losses[step]:.6f}  {rate:,.0f} tokens/s  {memory()}  {left}")
        if saved:
            saved.save(step, args=ocp.args.StandardSave(state), force=step == a.steps)
            if saved.reached_preemption(step):
                break  # the scheduler sent SIGTERM, so orbax has saved this step
    result.losses |= {number: float(loss) for number, loss in waiting.items()}
    if saved:
        saved.close()  # waits for what is being written
    if say:
        result.positions = by_position(a, corpus, mesh, model, state["parameters"])
    if say and a.sample:
        room = min(a.length, 1024 * mesh.shape["sp"])
        count = min(a.sample, room // 2)
        prompt = max(corpus.held_out, key=len)[: room - count]
        following = sample(model, mesh, state["parameters"], prompt, count, room)
        result.text = prompt[-100:].tobytes() + b" [here the model goes on] " + following
    return result


def by_position(
    a: argparse.Namespace, corpus: text_corpus.Corpus, mesh: Mesh, model: Model, parameters: Any
) -> list[tuple[int, float | None]]:
    """The mean loss of held-out documents by position, for the buckets of a context."""
    count = max(16, a.rows) // a.rows * a.rows
    rows, width = corpus.evaluation(a.length, count), -(-a.length // BUCKETS)

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, P()))
    def sums(parameters: Any, batch: Batch) -> jax.Array:
        losses = model.losses(mesh, parameters, batch)
        buckets = jax.nn.one_hot(batch["positions"] // width, BUCKETS)
        return jnp.einsum("cbt,btp->cp", jnp.stack([losses, (batch["labels"] >= 0).astype(losses.dtype)]), buckets)

    total = np.zeros((2, BUCKETS))
    for first in range(0, count, a.rows):
        batch = batch_of(mesh, a.layout, lambda n, first=first: rows[first + n], (a.rows, a.length))
        total += np.asarray(sums(parameters, batch))
    return [(n * width, float(s / c) if c else None) for n, (s, c) in enumerate(total.T)]


def record(a: argparse.Namespace, result: Result) -> dict[str, Any]:
    """Writes `run.json` into the folder `--out`, with the losses that a run before this one wrote there."""
    path, losses = a.out / "run.json", result.losses
    if path.exists() and min(losses, default=1) > 1:
        before = {int(step): loss for step, loss in json.loads(path.read_text())["losses"].items()}
        losses = {step: loss for step, loss in before.items() if step < min(losses)} | losses
    run = {
        "device": f"{len(jax.devices())} x {jax.devices()[0].device_kind}",
        "jax": jax.__version__,
        "options": {name: str(value) for name, value in vars(a).items()},
        "tokens_per_second": statistics.median(result.rates) if result.rates else 0.0,
        "memory": memory(),
        "losses": losses,
        "positions": result.positions,
    }
    a.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1))
    return run


def finish(a: argparse.Namespace, result: Result, say: Callable[[str], None]) -> None:
    """Writes and prints the results."""
    run, eighth = record(a, result), BUCKETS // 8
    for name, part in (("first", result.positions[:eighth]), ("last", result.positions[-eighth:])):
        known = [loss for _, loss in part if loss is not None]
        say(f"held-out loss in the {name} eighth of the context: {np.mean(known):.4f}" if known else "")
    text_curves.draw({"this run": run}, a.out / "curves.png")
    (a.out / "sample.txt").write_bytes(result.text)
    say(f"{result.text.decode(errors='replace')}\n\nThe curves, every loss and this sample are in {a.out.resolve()}.")


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
    corpus = text_corpus.read(a.data, a.rows * a.length, a.seed)
    multihost_utils.assert_equal(np.int32(corpus.fingerprint), "the processes read different text")
    say(f"{len(corpus.training):,} documents, {corpus.size:,} bytes; {len(corpus.held_out):,} documents held out")
    result = train(a, corpus, ring_mesh(axis_sizes=sizes), say)
    if jax.process_index() == 0:
        finish(a, result, say)
    if a.check:
        alone = train(a, corpus, ring_mesh(jax.local_devices()[:1], axis_sizes=dict.fromkeys(sizes, 1)), None).losses
        worst = max((abs(loss - alone[step]) for step, loss in result.losses.items()), default=0.0)
        if not worst <= a.check:
            raise SystemExit(f"The losses differ from those of one device by {worst:.1e}, more than {a.check}.")
        say(f"Every loss equals that of one device: the largest difference is {worst:.0e}.")


if __name__ == "__main__":
    main()
