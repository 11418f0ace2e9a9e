# SPDX-License-Identifier: Apache-2.0
"""Measures the candidates of one workload, in turns in one process: time, temporary memory, and error."""

import dataclasses
import datetime
import functools
import math
import platform
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import floors
import jax
import jax.numpy as jnp
from interleaved import ON_A_DEVICE, measured_rounds, ours, temporary_bytes, with_gradients
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ringattn_core import from_layout, ring_mesh, to_layout
from rivals import LAYOUT, OURS, RIVALS, Rival
from workloads import SUITES, Workload

TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2}
"""The largest relative error of a candidate. With a larger one it computes something else, and is not timed."""


@dataclasses.dataclass(frozen=True)
class Row:
    """What one candidate did in one part of a workload. `problem` says why it has no figures."""

    workload: str
    part: str
    who: str
    ring: int
    tokens: int
    problem: str | None = None
    seconds: tuple[float, ...] = ()
    """The seconds of one call in each round."""
    temporary: int | None = None
    """Bytes of temporary memory of one device, as XLA plans them."""
    error: float | None = None
    """RMS difference from one device in float32 over the RMS of its results; the worst of output and gradients."""
    rounding: float | None = None
    """The same for the exact results, rounded to the workload's dtype: the floor of `error`."""
    tera: float = 0.0
    """Operations of all devices, in units of 10^12."""
    floor: dict[str, float] = dataclasses.field(default_factory=dict)
    """The least seconds for operations, memory and link, at the best rates that any process of the run found."""


@dataclasses.dataclass(frozen=True)
class Task:
    """One workload of a suite, and what an earlier process of it has done already."""

    suite: str
    name: str
    rounds: int
    parts: tuple[str, ...]
    """The parts that are still to be measured."""
    crashed: Mapping[tuple[str, str, int], str] = dataclasses.field(default_factory=dict)
    """Candidates that ended an earlier process, by part, name and ring, and how."""

    @property
    def workload(self) -> Workload:
        return SUITES[self.suite][self.name]

    @property
    def rivals(self) -> dict[str, Rival]:
        return RIVALS[self.suite]


@dataclasses.dataclass(frozen=True)
class Prepared:
    """A compiled candidate: a call, its results in natural order, and its temporary memory."""

    call: Callable[[], Any]
    results: Callable[[], list[jax.Array]]
    temporary: int | None


def work(task: Task, send: Callable[[Any], None]) -> None:
    """Measures a task. Sends `machine()` first, `(part, who, ring)` before each step, and the rows of each part."""
    if task.suite == "cpu":
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", max(task.workload.rings))
    needed = {"cpu": "cpu", "tpu": "tpu"}.get(task.suite, "gpu")
    try:
        found = jax.default_backend()
    except RuntimeError as error:
        found = f"no device: {error}"
    if found != needed:
        raise SystemExit(f"the suite {task.suite} needs JAX on a {needed}, and this process has {found}")
    send(machine(floors.rates(2048)))
    for part in task.parts:
        send(_measured(task, part, send))


def machine(rates: floors.Rates) -> dict[str, Any]:
    """The devices, the versions, the date and the peak rates of a run. Runs on unlike devices are not comparable."""
    where = Path(__file__).parent
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=where, capture_output=True, text=True)
    return {
        "device": jax.devices()[0].device_kind if jax.default_backend() != "cpu" else _processor(),
        "devices": len(jax.devices()),
        "jax": jax.__version__,
        "commit": commit.stdout.strip(),
        "python": platform.python_version(),
        "date": datetime.date.today().isoformat(),
        "rates": dataclasses.asdict(rates),
    }


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    names = [line.split(":")[1].strip() for line in path.read_text().splitlines() if line.startswith("model name")]
    return f"{len(names)} cores of {names[0]}" if names else platform.processor()


def _measured(task: Task, part: str, send: Callable[[Any], None]) -> list[Row]:
    """A row for every candidate on every ring, including those that cannot run."""
    workload, rows = task.workload, []
    prepared: dict[tuple[str, int], Prepared] = {}
    exact, rounding = None, None
    for ring in workload.rings:
        for who, rival in task.rivals.items():
            if not rival.takes_part(workload, part, ring):
                continue
            row = Row(task.name, part, who, ring, workload.shape.tokens, tera=workload.tera(part))
            problem = task.crashed.get((part, who, ring)) or _why_not(rival, workload, ring)
            if problem is None:
                send((part, who, ring))
                try:
                    one = prepare(rival, workload, part, ring)
                    results = one.results()
                except Exception as error:
                    problem = (
                        f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120] if str(error) else ''}"
                    )
                else:
                    if exact is None or rounding is None:
                        exact = _exact(workload, part, results if (who, ring) == (OURS, 1) else None)
                        rounding = max(relative(x.astype(workload.shape.dtype), x) for x in exact)
                    error = max(map(relative, results, exact))
                    row = dataclasses.replace(row, temporary=one.temporary, error=error, rounding=rounding)
                    if error <= TOLERANCES[workload.shape.dtype]:
                        prepared[who, ring] = one
                    else:
                        problem = f"computes something else: its relative error is {error:.1e}"
            rows.append(dataclasses.replace(row, problem=problem))
    seconds = _timed(task, part, prepared, send)
    return [dataclasses.replace(row, seconds=tuple(seconds.get((row.who, row.ring), ()))) for row in rows]


def _why_not(rival: Rival, workload: Workload, ring: int) -> str | None:
    if ring > len(jax.devices()):
        return f"there are {len(jax.devices())} devices"
    return rival.missing() or rival.why_not(workload)


def _timed(task: Task, part: str, prepared: dict[tuple[str, int], Prepared], send: Callable[[Any], None]) -> Any:
    names = {f"{who}, ring of {ring}": (who, ring) for who, ring in prepared}
    found = measured_rounds(
        {name: prepared[key].call for name, key in names.items()},
        task.rounds,
        0.0 if task.suite == "cpu" else ON_A_DEVICE,
        starts=lambda name: send((part, *names[name])),
    )
    return {names[name]: seconds for name, seconds in found.items()}


def prepare(rival: Rival, workload: Workload, part: str, ring: int) -> Prepared:
    """Compiles a rival for a part of a workload, on a ring of the first devices."""
    mesh = None if ring == 1 else ring_mesh(jax.devices()[:ring])
    arrays = _arrays(workload, part, mesh)
    attend: Callable[..., Any] = rival.make(workload, mesh)
    if not rival.jax:
        call = functools.partial(attend, *arrays)
        return Prepared(call, lambda: call().block_until_ready().arrays(), None)
    program = jax.jit(with_gradients(attend) if part == "forward+backward" else attend).lower(*arrays).compile()

    def results() -> list[jax.Array]:
        found = [jax.device_put(x, jax.devices()[0]) for x in jax.tree.leaves(program(*arrays))]
        return found if mesh is None else [from_layout(x, LAYOUT, ring) if x.ndim == 4 else x for x in found]

    return Prepared(lambda: program(*arrays), results, temporary_bytes(program))


def _arrays(workload: Workload, part: str, mesh: Mesh | None = None) -> tuple[jax.Array, ...]:
    """The arrays of a call, and the cotangent of the output where there is a backward pass."""
    *arrays, dout = _placed(workload, mesh)
    return (*arrays, *workload.extras(), *((dout,) if part == "forward+backward" else ()))


@functools.cache
def _placed(workload: Workload, mesh: Mesh | None) -> tuple[jax.Array, ...]:
    """Query, key, value and cotangent, on one device or split over the ring. All candidates share them."""
    arrays = workload.shape.arrays(1 if workload.decode else None)
    if mesh is None:
        return arrays
    split = NamedSharding(mesh, PartitionSpec(None, "sp"))
    return tuple(jax.device_put(to_layout(x, LAYOUT, mesh.size), split) for x in arrays)


def _exact(workload: Workload, part: str, mine: list[jax.Array] | None) -> list[jax.Array]:
    """The results of our attention on one device in float32: `mine`, if the workload is in float32."""
    if workload.shape.dtype == "float32" and mine is not None:
        return mine
    arrays = tuple(x.astype(jnp.float32) for x in _arrays(workload, part))
    options = {} if workload.decode else workload.options()
    attend = ours(**options)
    program = jax.jit(with_gradients(attend) if part == "forward+backward" else attend)
    return jax.tree.leaves(program(*arrays))


def relative(got: jax.Array, want: jax.Array) -> float:
    """The RMS difference over the RMS of `want`; infinite where that is NaN, which no comparison would refuse.

    Computed where the arrays are: some have half a billion numbers.
    """
    found = float(_relative(got, want))
    return math.inf if math.isnan(found) else found


@jax.jit
def _relative(got: jax.Array, want: jax.Array) -> jax.Array:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.sqrt(jnp.mean((got - want) ** 2) / jnp.mean(want**2))
