# SPDX-License-Identifier: Apache-2.0
"""The table of a run of the suite, in Markdown: each figure beside its floor, and a sentence where there is none."""

import statistics
from collections.abc import Sequence
from typing import Any, Final

from measuring import Row
from workloads import LENGTHS, SMALL, SUITES, Workload

MIB: Final = 2**20
HEADER: Final = (
    "| part | who | ms | rounds | {unit} | floor, ms | of the floor's rate | temporary MiB | error |\n"
    "|---|---|--:|--:|--:|--:|--:|--:|--:|"
)


def whole(run: dict[str, Any]) -> str:
    """The machine, and a table for each workload. Those that differ in length only are in the plots."""
    names = dict.fromkeys(row.workload for row in run["rows"] if not row.workload.startswith(f"{LENGTHS} "))
    workloads = SMALL if run["smoke"] else SUITES[run["suite"]]
    parts = [about(run)]
    for name in names:
        rows = [row for row in run["rows"] if row.workload == name]
        parts.append(f"**{name}**: {described(workloads[name])}\n\n{table(rows, unit(run))}")
    return "\n\n".join(parts)


def about(run: dict[str, Any]) -> str:
    name, scale = unit(run)
    machine, rates = run["machine"], run["machine"]["rates"]
    link = "" if rates["link"] is None else f", {rates['link'] / 1e9:.3g} GB/s to a neighbour"
    peak = f"{scale * rates['operations'] / 1e12:.3g} {name}, {rates['memory'] / 1e9:.3g} GB/s of memory{link}"
    return (
        f"{machine['device']}, {machine['date']}, commit {machine['commit']}, JAX {machine['jax']}, Python "
        f"{machine['python']}; medians of {run['rounds']} rounds. Peak rates, from {rates['source']}: {peak}."
    )


def unit(run: dict[str, Any]) -> tuple[str, float]:
    """The unit of rates, and how many of it are 10^12 operations in a second."""
    return ("GFLOP/s", 1e3) if run["suite"] == "cpu" else ("TFLOP/s", 1.0)


def described(workload: Workload) -> str:
    shape = workload.shape
    heads = f"{shape.heads} heads" if shape.heads == shape.kv_heads else f"{shape.heads}/{shape.kv_heads} heads"
    what = f"{shape.batch} x {shape.tokens} {'keys' if workload.decode else 'tokens'}, {heads} of {shape.head_size}"
    mask = ["causal"] if workload.causal and not workload.decode else []
    if workload.window:
        mask.append(f"window of {workload.window[0] + 1}")
    if workload.document:
        mask.append(f"documents of {workload.document}")
    if workload.sinks:
        mask.append("sinks")
    return ", ".join([what, shape.dtype, *mask])


def table(rows: Sequence[Row], unit: tuple[str, float]) -> str:
    return "\n".join([HEADER.format(unit=unit[0]), *(line(row, unit[1]) for row in rows)])


def line(row: Row, scale: float) -> str:
    who = row.who + (f", ring of {row.ring}" if row.ring > 1 else "")
    if row.problem or not row.seconds:
        return f"| {row.part} | {who} | {row.problem or 'not measured'} | | | | | | |"
    seconds = statistics.median(row.seconds)
    by, floor = limit(row)
    memory = "" if row.temporary is None else f"{row.temporary / MIB:.1f}"
    error = "" if row.error is None else f"{row.error:.0e}" if row.error else "0"
    least, most = 1e3 * min(row.seconds), 1e3 * max(row.seconds)
    return (
        f"| {row.part} | {who} | {number(1e3 * seconds)} | {number(least)} to {number(most)} "
        f"| {number(scale * row.tera / seconds)} | {number(1e3 * floor)} ({by}) | {100 * floor / seconds:.0f}% "
        f"| {memory} | {error} |"
    )


def number(value: float) -> str:
    """Four digits, and no exponent for large numbers."""
    return f"{value:.0f}" if value >= 1e3 else f"{value:.4g}"


def limit(row: Row) -> tuple[str, float]:
    """What sets the floor of a row, and the floor in seconds."""
    return max(row.floor.items(), key=lambda item: item[1])
