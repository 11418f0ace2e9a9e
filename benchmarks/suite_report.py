# SPDX-License-Identifier: Apache-2.0
"""What a run of the suite shows: a table in Markdown, each figure beside its floor, and two plots."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from measuring import Row
from rivals import OURS, RIVALS
from workloads import LENGTHS, SUITES, Workload

MIB: Final = 2**20
HEADER: Final = (
    "| part | who | ms | rounds | {unit} | floor, ms | of the floor's rate | temporary MiB | error |\n"
    "|---|---|--:|--:|--:|--:|--:|--:|--:|"
)
STYLES: Final = tuple(
    zip(
        ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
        ("o-", "s-", "^-", "D-", "v-", "P-"),
        strict=True,
    )
)
"""The colour, and the marker and line, of each candidate of a suite."""


def whole(run: dict[str, Any]) -> str:
    """The machine, and a table for each workload. Those that differ in length only are in the plots."""
    names = dict.fromkeys(row.workload for row in run["rows"] if not row.workload.startswith(f"{LENGTHS} "))
    workloads = SUITES[run["suite"]]
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
    size = f"{shape.head_size}" + (f", values of {shape.values}" if shape.value_size else "")
    what = f"{shape.batch} x {shape.tokens} {'keys' if workload.decode else 'tokens'}, {heads} of {size}"
    mask = ["causal"] if workload.causal and not workload.decode else []
    if workload.window:
        mask.append(f"window of {workload.window[0] + 1}")
    if workload.documents:
        mask.append(f"{len(workload.documents)} documents")
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


def draw(run: dict[str, Any], folder: Path) -> None:
    """Writes the plots for which the run has figures: throughput against length, and efficiency against ring size."""
    for name, figure in (("throughput", throughput(run)), ("efficiency", efficiency(run))):
        if figure is not None:
            file = folder / f"benchmarks-{run['suite']}-{name}.svg"
            save(figure, file)
            print(f"wrote {file}")


def save(figure: Any, file: Path) -> None:
    """Writes a plot so that equal figures give equal files. Text stays text."""
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": file.name}):
        figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def axes_of(panels: int, labels: tuple[str, str], titles: tuple[str, ...]) -> tuple[Any, list[Any]]:
    import matplotlib.figure

    figure = matplotlib.figure.Figure(figsize=(4.6 * panels, 3.6), layout="constrained")
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for one, title in zip(axes, titles, strict=True):
        one.set_xscale("log", base=2)
        one.set_xlabel(labels[0])
        one.set_title(title, fontsize=10)
        one.spines[["top", "right"]].set_visible(False)
        one.grid(alpha=0.25)
    axes[0].set_ylabel(labels[1])
    return figure, axes


def ticks(axes: Any, values: set[int]) -> None:
    axes.set_xticks(sorted(values), [str(value) for value in sorted(values)])
    axes.minorticks_off()


def lines(axes: Any, suite: str, rows: list[Row], x: Callable[[Row], int], y: Callable[[Row], float]) -> None:
    """A line for each candidate, which looks the same in every plot."""
    names = list(RIVALS[suite])
    for who in dict.fromkeys(row.who for row in rows):
        mine = sorted((row for row in rows if row.who == who), key=x)
        colour, marker = STYLES[names.index(who) % len(STYLES)]
        axes.plot([x(row) for row in mine], [y(row) for row in mine], marker, color=colour, markersize=4, label=who)
    ticks(axes, {x(row) for row in rows})


def floor_line(axes: Any, rows: list[Row], x: Callable[[Row], int], y: Callable[[Row], float], label: str) -> None:
    """A dashed line, with one point for each place on the horizontal axis."""
    points = sorted({x(row): y(row) for row in rows}.items())
    axes.plot(*zip(*points, strict=True), "--", color="0.4", linewidth=1, label=label)


def finished(run: dict[str, Any], word: str) -> list[Row]:
    """The rows with measured times of the workloads whose names begin with `word`."""
    return [row for row in run["rows"] if row.workload.startswith(f"{word} ") and row.seconds]


def throughput(run: dict[str, Any]) -> Any:
    rows = finished(run, LENGTHS)
    if not rows:
        return None
    name, scale = unit(run)
    parts = tuple(dict.fromkeys(row.part for row in rows))
    figure, panels = axes_of(len(parts), ("tokens", name), parts)
    for axes, part in zip(panels, parts, strict=True):
        of_part = [row for row in rows if row.part == part]
        lines(
            axes,
            run["suite"],
            of_part,
            lambda row: row.tokens,
            lambda row: scale * row.tera / statistics.median(row.seconds),
        )
        peak = lambda row: scale * row.tera / limit(row)[1]  # noqa: E731
        floor_line(axes, of_part, lambda row: row.tokens, peak, "at the peak rates")
        axes.set_ylim(bottom=0)
    name_lines(panels)
    return figure


def name_lines(panels: Sequence[Any]) -> None:
    """One legend for all panels: a candidate may take part in the last one only."""
    found = {name: line for axes in panels for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    panels[-1].legend(list(found.values()), list(found), frameon=False, fontsize=8)


def efficiency(run: dict[str, Any]) -> Any:
    """The time of ours on one device over that of the ring, for the same tokens.

    Except on a CPU, whose devices share one processor, it is divided by the size of the ring.
    """
    rows = [row for row in finished(run, "ring") if row.ring > 1]
    alone = {(row.workload, row.part): row for row in finished(run, "ring") if row.ring == 1 and row.who == OURS}
    rows = [row for row in rows if (row.workload, row.part) in alone]
    if not rows:
        return None
    places = tuple(dict.fromkeys((row.workload, row.part) for row in rows))
    titles = tuple(f"{workload}\n{part}" for workload, part in places)
    figure, panels = axes_of(len(places), ("devices", "efficiency"), titles)
    for axes, place in zip(panels, places, strict=True):
        one = statistics.median(alone[place].seconds)
        of_place = [row for row in rows if (row.workload, row.part) == place]

        def share(row: Row, one: float = one) -> float:
            return one / statistics.median(row.seconds) / (1 if run["suite"] == "cpu" else row.ring)

        lines(axes, run["suite"], of_place, lambda row: row.ring, share)
        floor_line(axes, of_place, lambda row: row.ring, lambda row: 1.0, "one device")
        axes.set_ylim(bottom=0)
    name_lines(panels)
    return figure
