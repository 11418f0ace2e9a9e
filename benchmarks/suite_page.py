# SPDX-License-Identifier: Apache-2.0
"""Writes a run of the suite into docs/benchmarks.md: the plots and the table between the markers of its suite."""

import re
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import suite_tables
from measuring import Row
from rivals import OURS, RIVALS
from workloads import LENGTHS

DOCS: Final = Path(__file__).parent.parent / "docs"
STYLES: Final = tuple(
    zip(
        ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
        ("o-", "s-", "^-", "D-", "v-", "P-"),
        strict=True,
    )
)
"""The colour, and the marker and line, of each candidate of a suite."""


def update(run: dict[str, Any], docs: Path = DOCS) -> None:
    """Replaces the part of the page that shows this suite, and its plots. All else on the page stays."""
    page, name = docs / "benchmarks.md", run["suite"]
    place = re.compile(rf"(<!-- suite {name}: .*? -->\n).*?(<!-- suite {name}: end -->)", re.DOTALL)
    text = page.read_text()
    if not place.search(text):
        raise SystemExit(f"docs/benchmarks.md has no place for the suite {name}: add its two markers")
    pictures = []
    for what, (draw, sentence) in PLOTS.items():
        figure = draw(run)
        if figure is not None:
            file = docs / f"benchmarks-{name}-{what}.svg"
            save(figure, file)
            pictures.append(f"![{re.split('[.:,]', sentence)[0]}]({file.name})\n\n{sentence}")
    body = "\n\n".join([suite_tables.about(run), *pictures, *suite_tables.whole(run).split("\n\n")[1:]])
    page.write_text(place.sub(lambda match: f"{match[1]}\n{body}\n\n{match[2]}", text))
    print(f"wrote {page} and {len(pictures)} plots")


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
    name, scale = suite_tables.unit(run)
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
        peak = lambda row: scale * row.tera / suite_tables.limit(row)[1]  # noqa: E731
        floor_line(axes, of_part, lambda row: row.tokens, peak, "at the peak rates")
        axes.set_ylim(bottom=0)
    name_lines(panels)
    return figure


def name_lines(panels: Sequence[Any]) -> None:
    """One legend for all panels: a candidate may take part in the last one only."""
    found = {name: line for axes in panels for line, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    panels[-1].legend(list(found.values()), list(found), frameon=False, fontsize=8)


def memory(run: dict[str, Any]) -> Any:
    rows = [row for row in finished(run, LENGTHS) if row.temporary]
    if not rows:
        return None
    parts = tuple(dict.fromkeys(row.part for row in rows))
    figure, panels = axes_of(len(parts), ("tokens", "temporary MiB"), parts)
    rate = run["machine"]["rates"]["memory"]
    for axes, part in zip(panels, parts, strict=True):
        of_part = [row for row in rows if row.part == part]
        lines(axes, run["suite"], of_part, lambda row: row.tokens, lambda row: (row.temporary or 0) / suite_tables.MIB)
        moved = lambda row: row.floor["memory"] * rate / suite_tables.MIB  # noqa: E731
        floor_line(axes, of_part, lambda row: row.tokens, moved, "inputs and results")
        axes.set_yscale("log", base=10)
    name_lines(panels)
    return figure


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


def error(run: dict[str, Any]) -> Any:
    rows = [row for row in finished(run, "ring") if row.error and row.rounding]
    if not rows:
        return None
    places = tuple(dict.fromkeys((row.workload, row.part) for row in rows))
    titles = tuple(f"{workload}\n{part}" for workload, part in places)
    figure, panels = axes_of(len(places), ("devices", "relative RMS error"), titles)
    for axes, place in zip(panels, places, strict=True):
        of_place = [row for row in rows if (row.workload, row.part) == place]
        lines(axes, run["suite"], of_place, lambda row: row.ring, lambda row: row.error or 0.0)
        floor_line(axes, of_place, lambda row: row.ring, lambda row: row.rounding or 0.0, "exact, then rounded")
        axes.set_ylim(bottom=0)
    name_lines(panels)
    return figure


PLOTS: Final = {
    "throughput": (throughput, "Throughput against length, causal. The dashed line is the floor: the peak rates."),
    "efficiency": (
        efficiency,
        "Efficiency against ring size: the rate of the ring over that of ours on one device, for the same tokens. "
        "On a CPU all devices share one processor, and several may keep it busier than one; elsewhere the rate of the "
        "ring is that of one of its devices.",
    ),
    "memory": (memory, "Temporary memory against length. The dashed line is what the inputs and results take."),
    "error": (error, "Error against ring size. The dashed line is the error of exact results that are then rounded."),
}
