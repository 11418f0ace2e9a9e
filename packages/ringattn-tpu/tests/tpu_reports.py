# SPDX-License-Identifier: Apache-2.0
"""What a TPU would be given: programs compiled ahead of time, and what their schedules say.

Each chip is compiled for in a process of its own, because libtpu reads where to write its schedules when it loads.
"""

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Self

_ENVIRONMENT: Final = {
    "JAX_PLATFORMS": "cpu",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_LOG_DIR": "disabled",
    # What the metadata server would say, were it asked: without it there are warnings.
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "RINGATTN_TPU_INTERPRET": "1",  # the backend is then there on a CPU; what is lowered for a TPU is compiled
}
_UTILIZATION: Final = "final_hlo-static-per-bundle-utilization"
_APART: Final = 80
"""As many bundles without a product lie between two bodies of a kernel, and never within one."""
_SHORTEST_BODY: Final = 50


@dataclasses.dataclass(frozen=True)
class Permute:
    """A send: the kernels that run while it is under way; `synchronous` if it stops everything instead."""

    name: str
    synchronous: bool
    behind: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Report:
    """What the compiler says of one program.

    `bodies` are the bundles from the first to the last product of each body of a kernel, in the order of its code;
    `vmem` is what each kernel takes of the vector memory, in bytes; `peak` is the most memory that a device needs, in
    bytes; `kernels` counts launches.
    """

    permutes: tuple[Permute, ...]
    kernels: Mapping[str, int]
    bodies: Mapping[str, tuple[int, ...]]
    vmem: Mapping[str, int]
    peak: int

    @property
    def exposed(self) -> list[str]:
        """The sends behind which no kernel runs."""
        return [permute.name for permute in self.permutes if not permute.behind]

    def as_dict(self) -> dict[str, Any]:
        """Plain data, as JSON holds it."""
        return json.loads(json.dumps(dataclasses.asdict(self)))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of `as_dict`."""
        permutes = tuple(Permute(one["name"], one["synchronous"], tuple(one["behind"])) for one in data["permutes"])
        bodies = {name: tuple(found) for name, found in data["bodies"].items()}
        return cls(**{**data, "permutes": permutes, "bodies": bodies})


def compiled(topology: str, programs: Mapping[str, tuple[str, Mapping[str, Any]]]) -> dict[str, Report | str]:
    """A report on each program: `"module:function"`, and the options of that function.

    A program that the compiler refuses has its complaint instead.
    """
    with tempfile.TemporaryDirectory() as dump:
        flags = (
            f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*{_UTILIZATION}.*"
        )
        path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
        environment = {**os.environ, **_ENVIRONMENT, "LIBTPU_INIT_ARGS": flags, "PYTHONPATH": path}
        command = [sys.executable, __file__, topology, dump, json.dumps(programs)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"compiling for {topology} failed: {done.stderr[-4000:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: one if isinstance(one, str) else Report.from_dict(one) for name, one in found.items()}


def _compile(topology: str, dump: Path, programs: Mapping[str, tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    import jax
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    found: dict[str, Any] = {}
    for name, (builder, options) in programs.items():
        module, _, function = builder.partition(":")
        step, arrays = getattr(importlib.import_module(module), function)(devices, **options)
        before = set(dump.iterdir())
        try:
            program = jax.jit(step).lower(*arrays).compile()
        except jax.errors.JaxRuntimeError as error:
            found[name] = str(error)
            continue
        found[name] = of(program, set(dump.iterdir()) - before).as_dict()
    return found


def of(program: Any, dumped: set[Path]) -> Report:
    """The report on a compiled program, from its text and from what libtpu wrote of it."""
    text = program.as_text()
    assert "is_scheduled=true" in text, "the instructions are in no order yet"
    lines = [line for computation in schedules(text).values() for line in computation]
    products = _products(dumped)
    kernels: dict[str, int] = {}
    vmem: dict[str, int] = {}
    for line in lines:
        if name := _kernel(line):
            kernels[name] = kernels.get(name, 0) + 1
            vmem[name] = max(vmem.get(name, 0), *_numbers(_USED, line))
    return Report(
        permutes=tuple(permute for computation in schedules(text).values() for permute in permutes(computation)),
        kernels=kernels,
        bodies={name: max((bodies_of(one) for one in found), key=sum) for name, found in products.items()},
        vmem=vmem,
        peak=program.memory_analysis().peak_memory_in_bytes,
    )


_USED: Final = r'"used_scoped_memory_configs":\[\{"memory_space":"1","offset":"\d+","size":"(\d+)"'
_INSTRUCTION: Final = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = .*?[\])}] ([\w\-]+)\(")


def _numbers(pattern: str, line: str) -> list[int]:
    return [0, *map(int, re.findall(pattern, line))]


def schedules(text: str) -> dict[str, list[str]]:
    """The instructions of each computation that is scheduled, in order: the entry, and bodies of loops and branches."""
    found: dict[str, list[str]] = {}
    name = None
    for line in text.splitlines():
        if not line.startswith(" "):
            head = re.match(r"(?:ENTRY )?%([\w.\-]+) .*\{$", line)
            name = head[1] if head else None
        elif name is not None:
            found.setdefault(name, []).append(line)
    fused = set(re.findall(r"fusion\(.*?calls=%([\w.\-]+)", text))
    return {name: lines for name, lines in found.items() if name not in fused}


def permutes(schedule: list[str]) -> list[Permute]:
    """The sends of one schedule, and which kernels run between the start and the end of each."""
    found, under_way = [], {}
    for line in schedule:
        instruction = _INSTRUCTION.match(line)
        if instruction is None:
            continue
        name, operation = instruction.groups()
        if kernel := _kernel(line):
            for behind in under_way.values():
                behind.append(kernel)
        elif operation == "collective-permute":
            found.append(Permute(name, synchronous=True))
        elif operation == "collective-permute-start":
            under_way[name] = []
        elif operation == "collective-permute-done":
            started = re.search(r"collective-permute-done\([^)]*?%([\w.\-]+)\)", line)
            assert started is not None, line
            found.append(Permute(started[1], synchronous=False, behind=tuple(under_way.pop(started[1]))))
    return found


def _kernel(line: str) -> str | None:
    """Which kernel an instruction launches; one that only ties computes nothing, so that nothing hides behind it."""
    instruction = re.match(r"\s+(?:ROOT )?%([A-Za-z_]\w*?)(?:\.\d+)? = .*\"tpu_custom_call\"", line)
    name = instruction[1] if instruction else None
    return None if name == "ringattn_tie" else name


def _products(dumped: set[Path]) -> dict[str, list[list[int]]]:
    """Where the bundles with products are, of each kernel as often as it was compiled.

    A line says how much of each unit a bundle uses, the matrix units first. The first line is what there is of each.
    """
    found: dict[str, list[list[int]]] = {}
    for path in sorted(dumped):
        kernel = re.fullmatch(rf"\d+-([A-Za-z_]\w*?)(?:\.\d+)?-\d+-{_UTILIZATION}\.txt", path.name)
        if kernel:
            rows = [line.split() for line in path.read_text().splitlines() if re.fullmatch(r"[\d ]+", line)][1:]
            if places := [number for number, row in enumerate(rows) if int(row[0])]:
                found.setdefault(kernel[1], []).append(places)
    return found


def bodies_of(products: list[int]) -> tuple[int, ...]:
    """How many bundles each body has, from the places of those with products."""
    bodies: list[list[int]] = []
    for place in products:
        if bodies and place - bodies[-1][-1] <= _APART:
            bodies[-1].append(place)
        else:
            bodies.append([place])
    return tuple(body[-1] - body[0] + 1 for body in bodies if len(body) >= _SHORTEST_BODY)


if __name__ == "__main__":
    print(json.dumps(_compile(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))))
