# SPDX-License-Identifier: Apache-2.0
"""Launches a kernel from a JAX program: compiled by Mosaic on a TPU, interpreted by XLA on a CPU."""

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from ringattn_core.contract.launch import Interpreter, launch_primitive
from ringattn_core.contract.varying import align, axes_of

from .plugin import INTERPRET_VARIABLE
from .steps import IDLE, MASKED, Numbering, Steps

SIMULATE: Final = "simulate"
"""The value of `INTERPRET_VARIABLE` that asks for the simulator of a TPU, which is far slower than the interpreter."""
INTERPRETER: Final = Interpreter(INTERPRET_VARIABLE, "Mosaic", "TPU", "jax[tpu]", values=("1", SIMULATE))
VMEM_LIMIT: Final = 2**25 * 3 // 2
"""The bytes of vector memory that a kernel may use: 48 MiB. A core of the smallest of these TPUs has 64 MiB."""

Run = functools.partial[list[jax.Array]]
"""`_pallas`, bound to all arguments but the arrays and `interpret`: the static parameter of the primitive."""


def generation() -> int:
    """The generation of the TPU that a kernel is compiled for, such as 6 for v6e; 0 where JAX knows no chip yet.

    JAX knows the chip of a mesh, and else the devices of this process.
    """
    try:
        return pltpu.get_tpu_info().generation
    except ValueError:  # no TPU
        return 0


class At(NamedTuple):
    """The indices of a step: batch row, head of the grid, member of its group, kept tile (`own`) and visiting tile.

    `bits_of_head` is that of the block, in scalar memory; `None` if the block has none.
    """

    batch: Any
    head: Any
    member: Any
    own: Any
    visiting: Any
    bits_of_head: Any = None


class Operand(NamedTuple):
    """An input or output of a kernel: the shape of the `block` that a step works on, and `at`, which gives its index.

    `None` in the shape is an axis of length 1 that the kernel does not see. Without a `block` the kernel never reads
    the array: only its memory is used, by an output.
    """

    array: Any
    block: tuple[int | None, ...] | None = None
    at: Callable[[At], tuple[Any, ...]] | None = None

    def block_of(self, whole: Any, at: At) -> Any:
        """The block of a step, as a reference into the whole array, whose lengths are multiples of the block's."""
        assert self.block is not None and self.at is not None
        assert not any(length % (size or 1) for length, size in zip(whole.shape, self.block, strict=True))
        places = zip(self.at(at), self.block, strict=True)
        return whole.at[tuple(place if size is None else pl.ds(place * size, size) for place, size in places)]


@dataclasses.dataclass(frozen=True)
class Grid:
    """The loops around the steps, outermost first: batch rows, heads, then steps and members of a group.

    `members_inside`: the loop over members is the innermost; otherwise each member runs all steps before the next
    member.
    """

    batch: int
    heads: int
    members: int = 1
    members_inside: bool = True


def launch(
    kernel: Callable[..., None],
    steps: Steps,
    grid: Grid,
    inputs: Mapping[str, Operand],
    outputs: Mapping[str, Operand],
    *,
    scratch: Mapping[str, Any],
    cost: Any = None,
    name: str,
) -> dict[str, jax.Array]:
    """Calls `kernel(step, inputs, outputs, scratch)` at each step and returns the outputs by name.

    An output with the name of an input takes that input's memory, and keeps its values where no step writes. The
    outputs vary over the mesh axes that the inputs vary over.
    """
    arrays = {name: operand.array for name, operand in inputs.items()}
    run = functools.partial(
        _pallas,
        kernel=kernel,
        grid=grid,
        numbering=steps.numbering,
        rows=steps.rows,
        inputs={name: operand._replace(array=None) for name, operand in inputs.items()},
        outputs={
            name: operand._replace(array=jax.ShapeDtypeStruct(operand.array.shape, operand.array.dtype))
            for name, operand in outputs.items()
        },
        scratch=scratch,
        cost=cost,
        name=name,
    )
    tables = [table for table in (steps.listed, steps.bits_of_head) if table is not None]
    axes = axes_of(arrays, tables)
    results = _run(steps.length, *tables, *arrays.values(), run=run)
    return dict(zip(outputs, align(results, axes), strict=True))


class Step(NamedTuple):
    """A step as its kernel sees it: its flags (`steps.py`), its indices, and the number of members of a group."""

    flags: Any
    at: At
    members: int

    def has(self, flag: int) -> Any:
        return (self.flags & flag) != 0


def over_parts(step: Step, length: int, part: int, visit: Callable[[int, bool], None]) -> None:
    """Calls `visit(start, masked)` for every `part` of the `length` tokens of a visiting tile; not in an idle step.

    `masked` is false if all pairs of the two tiles are visible, so that the kernel needs no mask.
    """
    for masked in (False, True):

        @pl.when((step.flags & (MASKED | IDLE)) == (MASKED if masked else 0))
        def _(masked: bool = masked) -> None:
            for start in range(0, length, part):
                visit(start, masked)


def _run(*arrays: jax.Array, run: Run) -> list[jax.Array]:
    """Runs a launch as one primitive, or without one in the simulator, whose effects a primitive cannot have.

    The simulated TPU has two cores that share a grid. Its memory is NaN at first, and races raise.
    """
    if os.environ.get(INTERPRET_VARIABLE, "") != SIMULATE:
        return _launch.bind(*arrays, run=run)
    return run(*arrays, interpret=pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2, random_seed=0))


def _pallas(
    count: jax.Array,
    *arrays: jax.Array,
    interpret: Any,
    kernel: Callable[..., None],
    grid: Grid,
    numbering: Numbering,
    rows: int,
    inputs: Mapping[str, Operand],
    outputs: Mapping[str, Operand],
    scratch: Mapping[str, Any],
    cost: Any,
    name: str,
) -> list[jax.Array]:
    outer = grid.batch if rows == 1 else 1
    if grid.members_inside:
        loops, where = (outer, grid.heads, count, grid.members), (0, 1, 3, 2)
    else:
        loops, where = (outer, grid.heads, grid.members, count), (0, 1, 2, 3)

    def at(program: tuple[Any, ...], listed: Any, bits_of_head: Any = None) -> At:
        batch, head, member, step = (program[place] for place in where)
        number = listed[step]
        batch = batch if rows == 1 else numbering.batch(number)
        return At(batch, head, member, numbering.own(number), numbering.visiting(number), bits_of_head)

    def spec(operand: Operand) -> pl.BlockSpec:
        index = operand.at
        if index is None:
            return pl.BlockSpec(memory_space=pl.ANY)
        return pl.BlockSpec(operand.block, lambda *given: index(at(given[:4], *given[4 : 4 + table_count])))

    def body(*refs: Any) -> None:
        listed, (blocks, outputs, scratch) = refs[0], refs[-3:]
        program = tuple(pl.program_id(axis) for axis in range(4))
        place = at(program, *refs[:table_count])
        read = {name: inputs[name].block_of(ref, place) for name, ref in zip(whole, refs[table_count:-3], strict=True)}
        kernel(Step(listed[program[where[3]]], place, grid.members), blocks | read, outputs, scratch)

    def dtype_of_output(dtype: Any) -> Any:
        return jnp.float32 if interpret is True and dtype == jnp.bfloat16 else dtype

    table_count = len(arrays) - len(inputs)
    given = dict(zip(inputs, arrays[table_count:], strict=True))
    # In each step the interpreter copies every input that it divides into blocks, and converts all of an output in
    # bfloat16 twice (benchmarks/upstream/pallas_interpreter_copies.py). So inputs whose memory no output takes are
    # passed whole, as tables, from which `body` takes the blocks, and outputs in bfloat16 are float32 until the end.
    whole = {name: given.pop(name) for name in inputs if interpret is True and name not in outputs}
    tables = (*arrays[:table_count], *whole.values())
    places = {name: len(tables) + n for n, name in enumerate(sorted(given))}  # the leaves of a dict are sorted
    varying = jax.typeof(tables[0]).manual_axis_type
    shapes = {
        name: jax.ShapeDtypeStruct(operand.array.shape, dtype_of_output(operand.array.dtype), manual_axis_type=varying)
        for name, operand in outputs.items()
    }
    results = pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=loops,
            in_specs=[{name: spec(inputs[name]) for name in given}],
            out_specs={name: spec(operand) for name, operand in outputs.items()},
            scratch_shapes=[dict(scratch)],
        ),
        out_shape=shapes,
        input_output_aliases={places[name]: number for number, name in enumerate(sorted(shapes)) if name in given},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
        ),
        cost_estimate=cost,
        interpret=interpret,
        name=name,
    )(*tables, given)
    return [results[name].astype(operand.array.dtype) for name, operand in outputs.items()]


def _interpreted(*arrays: jax.Array, run: Run) -> list[jax.Array]:
    INTERPRETER.check(run.keywords["name"])
    return run(*arrays, interpret=True)


_launch: Final = launch_primitive(
    "ringattn_tpu_launch",
    lambda *_, run: [operand.array for operand in run.keywords["outputs"].values()],
    {"cpu": _interpreted, "tpu": lambda *arrays, run: run(*arrays, interpret=False)},
)
