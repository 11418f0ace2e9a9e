# SPDX-License-Identifier: Apache-2.0
"""Runs packed documents with gradients on rings of up to 8 CPU devices, and compares results, memory and time."""

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int32
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from ringattn_core import from_layout, ring_attention, to_layout

HEADS, KEY_HEADS, HEAD_SIZE, DOCUMENTS = 8, 2, 64, 5
RINGS = (1, 2, 4, 8)
MIB = 2**20
EXCESS = """Why bars exceed the even split: not all temporary memory shrinks with the shard. Tiles of scores
have one size for every ring. While a rank computes with one shard of keys and values, the next
shard arrives; in the backward pass the gradients of keys and values travel with them."""


@dataclasses.dataclass(frozen=True)
class PackedSequence:
    """One long sequence of several documents, and the cotangent of the output."""

    query: Float[Array, "1 T N H"]
    key: Float[Array, "1 T K H"]
    value: Float[Array, "1 T K H"]
    dout: Float[Array, "1 T N H"]
    segments: Int32[Array, "1 T"]

    @property
    def arrays(self) -> tuple[jax.Array, ...]:
        return self.query, self.key, self.value, self.dout, self.segments


@dataclasses.dataclass(frozen=True)
class RingRun:
    """The times, the memory and the results of one ring size; results are in natural order."""

    ring: int
    compile_seconds: float
    seconds: float
    held: int
    temporary: int
    results: tuple[np.ndarray, ...]


def make_sequence(tokens: int) -> PackedSequence:
    """Documents of random lengths, each a segment."""
    rng = np.random.default_rng(0)
    cuts = np.sort(rng.choice(np.arange(1, tokens), DOCUMENTS - 1, replace=False))
    segments = np.searchsorted(cuts, np.arange(tokens), side="right").astype(np.int32)

    def normal(heads: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal((1, tokens, heads, HEAD_SIZE), np.float32))

    return PackedSequence(
        normal(HEADS), normal(KEY_HEADS), normal(KEY_HEADS), normal(HEADS), jnp.asarray(segments[None])
    )


def gradients(mesh: Mesh | None, layout: str) -> Callable[..., tuple[Any, ...]]:
    """The function that returns output, dq, dk and dv; without a mesh it runs on one device."""
    ring = {} if mesh is None else {"mesh": mesh, "axis_name": "sp", "layout": layout}

    def step(query: jax.Array, key: jax.Array, value: jax.Array, dout: jax.Array, segments: jax.Array):
        def attend(query: jax.Array, key: jax.Array, value: jax.Array):
            return ring_attention(query, key, value, q_segment_ids=segments, causal=True, **ring)

        out, pullback = jax.vjp(attend, query, key, value)
        return out, *pullback(dout)

    return step


def measure(sequence: PackedSequence, ring: int, advance: Callable[[str], None]) -> RingRun:
    """Compiles and runs one ring size. The striped layout gives every rank the same work, wherever documents end."""
    layout = "striped"
    mesh = Mesh(np.array(jax.devices()[:ring]), ("sp",)) if ring > 1 else None
    arrays = sequence.arrays
    if mesh is not None:
        split = NamedSharding(mesh, PartitionSpec(None, "sp"))
        arrays = tuple(jax.device_put(to_layout(x, layout, ring), split) for x in arrays)
    start = time.perf_counter()
    compiled = jax.jit(gradients(mesh, layout)).lower(*arrays).compile()
    compile_seconds = time.perf_counter() - start
    advance(f"ring of {ring}: running")
    start = time.perf_counter()
    results = jax.block_until_ready(compiled(*arrays))
    seconds = time.perf_counter() - start
    memory = compiled.memory_analysis()
    assert memory is not None, "XLA tells the memory of every program that it compiles for a CPU"
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes
    natural = tuple(np.asarray(x) if mesh is None else from_layout(np.asarray(x), layout, ring) for x in results)
    return RingRun(ring, compile_seconds, seconds, held, memory.temp_size_in_bytes, natural)


def errors(run: RingRun, reference: RingRun) -> list[float]:
    """The largest difference of the output and of each gradient, relative to its largest entry."""
    pairs = zip(run.results, reference.results, strict=True)
    return [float(np.max(np.abs(got - want)) / np.max(np.abs(want))) for got, want in pairs]


def show(runs: list[RingRun], tokens: int, console: Console) -> None:
    heads = f"{HEADS} query heads on {KEY_HEADS} key heads"
    table = Table(title=f"{tokens} tokens in {DOCUMENTS} documents, {heads}, float32, causal")
    for column in ("ring", "tokens", "compile", "run", "in, out", "temporary", "output", "gradients"):
        table.add_column(column, justify="right")
    table.add_row("size", "each", "s", "s", "MiB each", "MiB each", "error", "error", style="dim", end_section=True)
    for run in runs:
        out, *gradients = errors(run, runs[0])
        table.add_row(
            str(run.ring),
            str(tokens // run.ring),
            f"{run.compile_seconds:.1f}",
            f"{run.seconds:.1f}",
            f"{run.held / MIB:.1f}",
            f"{run.temporary / MIB:.1f}",
            "-" if run.ring == 1 else f"{out:.0e}",
            "-" if run.ring == 1 else f"{max(gradients):.0e}",
        )
    console.print(table)
    scores = HEADS * tokens**2 * 4 / MIB
    console.print(f"The scores alone, as one matrix, would take {scores:.0f} MiB on one device.")
    console.print("All devices share this CPU: the memory of each shrinks, the time does not.")


def plot(runs: list[RingRun], tokens: int, path: Path) -> None:
    """Draws memory per device by ring size, with a mark on each bar for an even split of the memory of one device."""
    figure = matplotlib.figure.Figure(figsize=(6.8, 5.0), layout="constrained")
    axes = figure.subplots()
    place = np.arange(len(runs))
    held = np.array([run.held / MIB for run in runs])
    total = held + np.array([run.temporary / MIB for run in runs])
    axes.bar(place, held, 0.6, label="one shard of q, k, v, output, their gradients, and segments", color="#4c72b0")
    axes.bar(
        place,
        total - held,
        0.6,
        bottom=held,
        label="temporary: tiles of scores; keys, values and gradients in transit",
        color="#dd8452",
    )
    even = total[0] / np.array([run.ring for run in runs])
    axes.hlines(even[1:], place[1:] - 0.4, place[1:] + 0.4, colors="black", label="even split of one device's memory")
    for x, height in zip(place, total, strict=True):
        axes.annotate(f"{height:.1f}", (x, height), ha="center", va="bottom", xytext=(0, 3), textcoords="offset points")
    axes.set_xticks(place, [str(run.ring) for run in runs])
    axes.set_xlabel("ring size (devices)")
    axes.set_ylabel("MiB per device")
    axes.set_title(f"Ring attention with gradients, {tokens} tokens")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.supxlabel(EXCESS, fontsize=8.5, x=0.02, ha="left", multialignment="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--plot", type=Path, default=Path("build/quickstart.png"))
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(RINGS))

    console = Console()
    sequence = make_sequence(arguments.tokens)
    runs: list[RingRun] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=2 * len(RINGS))
        for ring in RINGS:
            progress.update(task, description=f"ring of {ring}: compiling")
            runs.append(measure(sequence, ring, lambda text: progress.update(task, description=text, advance=1)))
            progress.advance(task)
        progress.update(task, description="done")

    show(runs, arguments.tokens, console)
    plot(runs, arguments.tokens, arguments.plot)
    console.print(f"The plot of memory per device: {arguments.plot.resolve()}")
    worst = max(error for run in runs[1:] for error in errors(run, runs[0]))
    if not worst < 5e-5:
        raise SystemExit(f"The rings differ from one device by {worst:.1e}, more than 5e-5.")
    console.print(f"Every ring agrees with one device: the largest relative difference is {worst:.0e}.")


if __name__ == "__main__":
    main()
