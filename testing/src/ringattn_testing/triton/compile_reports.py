# SPDX-License-Identifier: Apache-2.0
"""What a GPU would be given: the kernels of a lowered program, assembled here, with their registers and spills.

No GPU is needed: Triton brings its assemblers along.
"""

import dataclasses
import re
import subprocess
import tempfile
import zlib
from pathlib import Path
from typing import Any

import triton.backends.nvidia
from ringattn_triton.kernels.parameters import by_parameter, paths
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

_BIN = Path(triton.backends.nvidia.__file__).parent / "bin"
_POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32", "uint32": "*u32"}
_POINTERS |= {"bool": "*i1", "int8": "*i8", "int64": "*i64", "uint8": "*u8"}


@dataclasses.dataclass(frozen=True)
class Report:
    """One kernel: its launch, the resources that it takes, and which matrix instructions it has."""

    name: str
    target: str
    warps: int
    threads: int
    """How many the code was compiled for."""
    shared: int
    registers: int
    spilled: int
    """Bytes of stack of each thread on NVIDIA; spilled vector registers on AMD."""
    matrix: str
    """`wgmma`, `mma`, `tcgen05`, `mfma`, or nothing where products run on the ordinary units."""
    serialized: bool = False
    """Whether the assembler lets products on Hopper wait for each other, because of what is done with their sums."""

    def __str__(self) -> str:
        used = f"{self.warps} warps, {self.registers} registers, {self.shared} bytes shared"
        return (
            f"{self.name} on {self.target}: {used}, {self.spilled} spilled, {self.matrix or 'no'} matrix instructions"
        )


def of_lowered(lowered: Any) -> list[Report]:
    """A report on each kernel that a program launches on NVIDIA, from the message that the runtime gets."""
    return [_of_call(call) for call in _calls(lowered.compiler_ir().operation)]


def _calls(operation: Any) -> list[bytes]:
    """The launches of a program, as jaxlib serialises them."""
    found = []
    for region in operation.regions:
        for block in region:
            for inner in block:
                attributes = inner.operation.attributes
                if "call_target_name" in attributes and "triton_kernel_call" in str(attributes["call_target_name"]):
                    found.append(zlib.decompress(attributes["mhlo.backend_config"]["opaque"].value_bytes))
                found += _calls(inner.operation)
    return found


def _of_call(message: bytes) -> Report:
    call = _fields(message)  # the launch, and the name under which it was lowered
    kernel = _fields(_fields(call[1])[1])
    ptx = kernel[4].decode()
    target = _found(r"\.target (\w+)", ptx)
    kinds = {"tcgen05": "tcgen05.mma", "wgmma": "wgmma.mma_async", "mma": "mma.sync"}
    return Report(
        name=call[4].decode(),
        target=target,
        warps=kernel[2],
        threads=int(_found(r"\.(?:reqntid|maxntid) (\d+)", ptx)),
        shared=kernel.get(3, 0),
        matrix=next((kind for kind, instruction in kinds.items() if instruction in ptx), ""),
        **_assembled(ptx, target),
    )


def _assembled(ptx: str, target: str) -> dict[str, int]:
    tool = "ptxas-blackwell" if int(_found(r"(\d+)", target)) >= 100 else "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [_BIN / tool, "-v", f"-arch={target}", source, "-o", Path(folder, "kernel.cubin")]
        done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{tool} refuses the PTX for {target}: {done.stderr}"
    numbers = {"registers": r"Used (\d+) registers", "spilled": r"(\d+) bytes stack frame"}
    found = {name: int(_found(pattern, done.stderr)) for name, pattern in numbers.items()}
    return found | {"serialized": "wgmma.mma_async instructions are serialized" in done.stderr}


def _found(pattern: str, text: str) -> str:
    match = re.search(pattern, text)
    assert match is not None, f"{pattern!r} is nowhere in {text[:2000]}"
    return match[1]


def _fields(message: bytes) -> dict[int, Any]:
    """The fields of a protocol buffer by number: numbers, and bytes for all that has a length."""
    at, fields = 0, {}

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        tag = varint()
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            fields.setdefault(number, varint())
        elif kind == 2:
            size = varint()
            fields.setdefault(number, message[at : at + size])
            at += size
        else:
            at += 8 if kind == 1 else 4
    return fields


def launches(jaxpr: Any) -> list[tuple[Any, list[Any]]]:
    """Every launch of a traced program, with the types of its operands."""
    found = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "ringattn_triton_launch":
            found.append((equation.params["call"], [variable.aval for variable in equation.invars]))
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found += launches(inner)
    return found


def for_amd(call: Any, operands: list[Any], architecture: str) -> Report:
    """A report on a launch, compiled with the same constants for an AMD GPU."""
    names = call.kernel.arg_names
    constants = dict(call.constants)
    types = (_POINTERS[x.dtype.name] for x in (*operands, *call.outputs))
    pointers = by_parameter([name for name in names if name not in constants], types)
    signature = {name: pointers.get(name, "constexpr") for name in names}
    aligned = {path: [["tt.divisibility", 16]] for path in paths(names, pointers)}
    source = ASTSource(call.kernel, signature, constants, aligned)
    options = {"num_warps": call.warps, "num_stages": call.stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("hip", architecture, 64), options=options)
    code = compiled.asm["amdgcn"]

    def count(field: str) -> int:
        return int(_found(rf"\.{field}:\s+(\d+)", code))

    return Report(
        name=call.name,
        target=architecture,
        warps=compiled.metadata.num_warps,
        threads=count("max_flat_workgroup_size"),
        shared=compiled.metadata.shared,
        registers=count("vgpr_count"),
        spilled=count("vgpr_spill_count"),
        matrix="mfma" if "v_mfma" in code else "",
    )
