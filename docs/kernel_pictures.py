# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of docs/kernels.md: how the one-pass backward kernel works. Run it to redraw them."""

import dataclasses
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple
from xml.sax.saxutils import escape

import jax
from ringattn_triton.hopper.backward import TARGET
from ringattn_triton.hopper.backward_memory import allocate
from ringattn_triton.hopper.plans import BACKWARD
from ringattn_triton.interpreter.programs import interpreted
from triton.experimental.gluon import language as gl
from turn_times import Turn, causal_turns

PICTURES: Final = Path(__file__).parent / "pictures"
FONT: Final = "'DejaVu Sans', 'Bitstream Vera Sans', Verdana, Arial, Helvetica, sans-serif"
COLOURS: Final = ("#7fb2e5", "#f4b56a", "#8ccf9b", "#d59ad6", "#e3d979")
PALE, LINE, WAITING = "#e9edf1", "#8a9099", "#d1495b"
WIDTH: Final = 720


class Canvas:
    """An SVG picture on a white background, to which shapes are added one after another."""

    def __init__(self, height: float) -> None:
        self.height = height
        self.parts: list[str] = []

    def text(self, x: float, y: float, words: str, size: float = 10, anchor: str = "start", bold: bool = False) -> None:
        weight = ' font-weight="bold"' if bold else ""
        self.parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" text-anchor="{anchor}"{weight}>{escape(words)}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, fill: str, words: str = "", size: float = 9,
        line: str = "#ffffff",
    ) -> None:  # fmt: skip
        """A rectangle with `words` in its middle."""
        shape = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        self.parts.append(f'<rect {shape} fill="{fill}" stroke="{line}" stroke-width="0.8"/>')
        if words:
            self.text(x + width / 2, y + height / 2 + size * 0.36, words, size, "middle")

    def line(self, x: float, y: float, to_x: float, to_y: float, dashed: bool = False) -> None:
        dashes = ' stroke-dasharray="3 3"' if dashed else ""
        self.parts.append(f'<path d="M{x:g} {y:g}L{to_x:g} {to_y:g}" stroke="{LINE}" stroke-width="0.8"{dashes}/>')

    def svg(self) -> str:
        size = f'width="{WIDTH}" height="{self.height:g}"'
        root = f'xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {WIDTH} {self.height:g}" font-family="{FONT}"'
        return "\n".join([f"<svg {root}>", f'<rect {size} fill="#ffffff"/>', *self.parts, "</svg>", ""])


class Work(NamedTuple):
    """What one row of the pipeline does for a step, from `begun` to `ended`."""

    row: int
    words: str
    step: int
    begun: float
    ended: float


ROWS: Final = (
    "producer", "consumer 0, products", "threads", "consumer 1, products", "threads", "writer 0", "writer 1",
)  # fmt: skip
CONSUMERS, WRITERS = (1, 3), (5, 6)


def pipeline_work(steps: int) -> list[Work]:
    """The first steps of a turn. Lengths are rough; waits are those of `backward_products` and `backward_transfers`."""
    found: list[Work] = []
    free = [0.0] * len(ROWS)
    ended: dict[tuple[str, int], float] = {}

    def work(row: int, words: str, step: int, length: float, *needs: tuple[str, int]) -> None:
        begun = max(free[row], *(ended.get(need, 0.0) for need in needs), 0.0)
        free[row] = begun + length
        ended[words, step] = max(begun + length, ended.get((words, step), 0.0))
        found.append(Work(row, words, step, begun, begun + length))

    for step in range(steps):
        # There are two stages for q and for dout, so both consumers must have read what came two steps ago.
        q, dout, length = ("q, k", "dout, v", 8) if step == 0 else ("q", "dout", 5)
        work(0, q, step, length, ("dK", step - 2))
        work(0, dout, step, length, ("dQ", step - 2))
        for row in CONSUMERS:
            work(row, "S", step, 5, (q, step), ("store", step - 1))
            work(row, "dP", step, 5, (dout, step))
            work(row + 1, "exp", step, 7, ("S", step))
            work(row, "dV", step, 5, ("exp", step))
            work(row + 1, "dS", step, 6, ("dP", step))
        for row in CONSUMERS:  # each reads the ds of both
            work(row, "dQ", step, 5, ("dS", step))
            work(row, "dK", step, 5)
            work(row + 1, "store", step, 6, ("dQ", step), ("read", step - 1))
        work(WRITERS[step % 2], "read", step, 5, ("store", step))
        work(WRITERS[step % 2], "reaches memory, counter + 1", step, 37)
    return found


def pipeline() -> str:
    """What each warp does in three steps, and in which step."""
    left, scale, height, top = 120, 4.3, 22, 28
    canvas = Canvas(top + len(ROWS) * height + 26)
    bottom = top + len(ROWS) * height
    for row, name in enumerate(ROWS):
        canvas.text(left - 8, top + row * height + 14, name, 9, "end")
    for one in pipeline_work(3):
        x, y = left + scale * one.begun, top + one.row * height
        canvas.box(x, y + 1, scale * (one.ended - one.begun), height - 2, COLOURS[one.step], one.words, 8)
        if (one.row, one.words) == (CONSUMERS[0], "S"):
            canvas.line(x, top - 8, x, bottom, dashed=True)
            canvas.text(x + 4, top - 8, f"step {one.step}", 9)
    canvas.text(left, bottom + 16, "time, in rough lengths; a colour is a step; products run on the tensor cores", 9)
    return canvas.svg()


def schedule() -> str:
    """Which turns three programs take, and when, in the orders of turns that the kernel has."""
    left, height, panel = 84, 17, 72
    pairs = (
        (BACKWARD[128], "heads up to 128", ("downwards", "upwards")),
        (BACKWARD[192], "heads above 128", ("downwards", "interleaved")),
    )
    canvas = Canvas(4 * panel + 26)
    top = 16
    for plan, sizes, names in pairs:
        both = [
            causal_turns(
                dataclasses.replace(plan, upwards=name == "upwards", interleaved=name == "interleaved"), 6, 4, 3
            )
            for name in names
        ]
        scale = (WIDTH - 8 - left) / max(turn.ended for turns in both for turn in turns)
        for name, turns in zip(names, both, strict=True):
            last = "; the last head downwards" if name == "upwards" else ""
            canvas.text(8, top, f"{sizes}, {name}{last}", bold=True)
            canvas.text(WIDTH - 8, top, f"{max(turn.ended for turn in turns):g} steps", anchor="end")
            for program in sorted({turn.program for turn in turns}):
                canvas.text(left - 8, top + 19 + program * height, f"program {program}", 9, "end")
            for turn in turns:
                x, y = left + scale * turn.begun, top + 7 + turn.program * height
                canvas.box(x, y, scale * (turn.ended - turn.begun), height - 1, COLOURS[turn.head])
                for begun, ended in waits(turn):
                    canvas.box(left + scale * begun, y + height - 5, scale * (ended - begun), 3, WAITING, line=WAITING)
                canvas.text(x + 4, y + 11, str(turn.key_tile), 9)
            top += panel
    canvas.text(
        left, top, "time; a box is a turn, its number a key tile, its colour a head; red: it waits to add to dq", 9
    )
    return canvas.svg()


def waits(turn: Turn) -> list[tuple[float, float]]:
    """When a turn waits: the times at which it computes nothing."""
    after = [(step.begun + 1, step.ended) for step in turn.steps] + [(turn.steps[-1].ended, turn.ended)]
    return [(begun, ended) for begun, ended in after if ended > begun]


def order() -> str:
    """For each tile of dq (row) and turn (column): the turn's rank, and when it adds to the tile."""
    tiles, width, height, top = 5, 56, 24, 44
    plan = BACKWARD[128]
    rows = tiles * plan.kv_tile // plan.q_tile
    canvas = Canvas(top + rows * height + 26)
    titles = "downwards: the last dq tile first", "upwards: the first dq tile first"
    for number, title in enumerate(titles):
        left = 50 + 352 * number
        # The turns of the last head never go upwards, so this takes the first of two heads.
        both = causal_turns(dataclasses.replace(plan, upwards=number == 1), tiles, heads=2, programs=tiles)
        canvas.text(left, 16, title, bold=True)
        canvas.box(left, top, tiles * width, rows * height, PALE)
        for tile in range(rows):
            canvas.text(left - 6, top + tile * height + 16, f"dq {tile}", 9, "end")
        for turn in both[:tiles]:
            x = left + turn.key_tile * width
            canvas.text(x + width / 2, top - 6, f"keys {turn.key_tile}", 9, "middle")
            for step in turn.steps:
                y = top + step.tile * height
                canvas.box(x, y, width, height, COLOURS[step.rank])
                canvas.text(x + 8, y + 16, str(step.rank), bold=True)
                canvas.text(x + width - 8, y + 16, f"t {step.added:g}", 9, "end")
    legend = "bold: the turn's rank, which the tile's counter must equal; t: when it adds, in steps, if all begin at 0"
    canvas.text(50, canvas.height - 8, legend, 9)
    return canvas.svg()


def stages(bias: bool = False) -> list[tuple[str, int, int]]:
    """Each array in shared memory of a program with heads of 128: its name, number of stages and bytes of a stage."""
    subtracting = not bias  # as in a causal call in bfloat16
    plan = dataclasses.replace(
        BACKWARD[128], masked=True, ordered=True, query_kinds=("offset",), subtracting=subtracting
    )
    sizes = SimpleNamespace(head_dim=128, value_dim=128, bias=bias)
    untyped: Any = allocate  # typed as a decorator
    memory = interpreted(untyped)(gl.bfloat16, sizes, plan)
    assert memory.dout is memory.q and memory.v is memory.k, "these share an allocation"
    found = []
    small = ("per_query", "numbers", "q_full", "barriers")
    for name in ("k", "q", "ds", "dq", "bias" if bias else "split", *small):
        (array,) = array if isinstance(array := getattr(memory, name), tuple) else (array,)
        of_stage = math.prod(array.shape[1:]) * array.dtype.primitive_bitwidth // 8
        found.append((name, array.shape[0], of_stage))
    (_, _, of_k), (_, _, of_q), *others = found
    split = ("k", plan.v_first, of_k), ("v", 1, of_k), ("q", plan.dout_first, of_q), ("dout", plan.dout_stages, of_q)
    assert sum(count for _, count, _ in split) == found[0][1] + found[1][1]
    return [*split, *others]


def memory() -> str:
    """The stages of a program's shared memory, in KiB, and who fills and reads them."""
    left, top, height = 16, 42, 54
    limit = TARGET.shared_memory
    assert limit is not None
    scale = (WIDTH - 2 * left) / limit
    canvas = Canvas(top + height + 46)
    at = small = 0

    def box(size: int, colour: str, name: str, number: str) -> None:
        x, width = left + scale * at, scale * size
        canvas.box(x, top, width, height, colour)
        canvas.text(x + width / 2, top + 24, name, 9, "middle", bold=True)
        canvas.text(x + width / 2, top + 40, number, 9, "middle")

    def bracket(begun: int, ended: int, *lines: str) -> None:
        x, to, y = left + scale * begun + 1, left + scale * ended - 1, top + height + 6
        canvas.line(x, y, to, y)
        for number, words in enumerate(lines):
            canvas.text((x + to) / 2, y + 14 + 13 * number, words, 9, "middle")

    colours, readers = {"ds": COLOURS[1], "dq": COLOURS[2]}, {"ds": "consumers", "dq": "writers"}
    for name, count, size in stages():
        if size < 4096:
            small += count * size
            continue
        begun = at
        for number in range(count):
            box(size, colours.get(name, COLOURS[0]), f"{name} {number}" if count > 1 else name, f"{size // 1024}")
            at += size
        if name == "dout":
            bracket(0, at, "from the producer to consumers", "k and v for a turn, q and dout for a step")
        elif name in readers:
            bracket(begun, at, "from consumers", f"to {readers[name]}")
    words = f"lse, delta, positions, barriers: {small / 1024:.1f}"
    canvas.text(left + scale * (at + small / 2), top - 6, words, 9, "middle")
    box(small, COLOURS[3], "", "")
    at += small
    words = f"shared memory of a program with heads of 128: {at / 1024:.1f} of {limit // 1024} KiB"
    canvas.text(left, 16, words, bold=True)
    box(limit - at, PALE, "free", f"{(limit - at) / 1024:.1f}")
    with_bias = stages(bias=True)
    (of_bias,) = [count * size for name, count, size in with_bias if name == "bias"]
    less = at + of_bias - sum(count * size for _, count, size in with_bias)
    bracket(at, limit, f"a bias takes {of_bias // 1024},", f"lse then {less // 1024} less")
    return canvas.svg()


DRAWN: Final = {"pipeline": pipeline, "schedule": schedule, "order": order, "memory": memory}


def path_of(name: str) -> Path:
    return PICTURES / f"backward-{name}.svg"


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    for name, draw in DRAWN.items():
        path_of(name).write_text(draw())
