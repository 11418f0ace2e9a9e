# SPDX-License-Identifier: Apache-2.0
"""What a TPU would be given: programs compiled ahead of time, and what their schedules say.

Each chip is compiled for in a process of its own, beside the other tests.
"""

import dataclasses
import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
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


@dataclasses.dataclass(frozen=True)
class Permute:
    """A send: the kernels that run while it is under way; `synchronous` if it stops everything instead."""

    name: str
    synchronous: bool
    behind: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Report:
    """What the compiler says of one program.

    `vmem` is what each kernel takes of the vector memory, in bytes; `peak` is the most memory that a device needs, in
    bytes; `kernels` counts launches.
    """

    permutes: tuple[Permute, ...]
    kernels: Mapping[str, int]
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
        return cls(**{**data, "permutes": permutes})


def compiled(topology: str, programs: Mapping[str, tuple[str, Mapping[str, Any]]]) -> dict[str, Report]:
    """A report on each program: `"module of this package:function"`, and the options of that function."""
    environment = {**os.environ, **_ENVIRONMENT}
    command = [sys.executable, "-m", __name__, topology, json.dumps(programs)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"compiling for {topology} failed: {done.stderr[-4000:]}"
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: Report.from_dict(one) for name, one in found.items()}


def _compile(topology: str, programs: Mapping[str, tuple[str, Mapping[str, Any]]]) -> dict[str, Any]:
    import jax
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    found: dict[str, Any] = {}
    for name, (builder, options) in programs.items():
        module, _, function = builder.partition(":")
        step, arrays = getattr(importlib.import_module(f"{__package__}.{module}"), function)(devices, **options)
        found[name] = of(jax.jit(step).lower(*arrays).compile()).as_dict()
    return found


def of(program: Any) -> Report:
    """The report on a compiled program, from its text."""
    text = program.as_text()
    assert "is_scheduled=true" in text, "the instructions are in no order yet"
    lines = [line for computation in schedules(text).values() for line in computation]
    kernels: dict[str, int] = {}
    vmem: dict[str, int] = {}
    for line in lines:
        if name := _kernel(line):
            kernels[name] = kernels.get(name, 0) + 1
            vmem[name] = max(vmem.get(name, 0), *_numbers(_USED, line))
    return Report(
        permutes=tuple(permute for computation in schedules(text).values() for permute in permutes(computation)),
        kernels=kernels,
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


if __name__ == "__main__":
    print(json.dumps(_compile(sys.argv[1], json.loads(sys.argv[2]))))
