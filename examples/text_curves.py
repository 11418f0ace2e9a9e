# SPDX-License-Identifier: Apache-2.0
"""Draws the losses of runs of `train_text.py`: against steps, and against the position in the context. Prints means.

python text_curves.py curves.png ours=build/text/run.json cuDNN=other/run.json
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib.figure
import numpy as np

SMOOTH = 20
"""Steps over which a curve is averaged; each step is drawn faintly behind it."""


def draw(runs: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """One picture of all runs, by name. A run is what `train_text.py` writes into `run.json`."""
    figure = matplotlib.figure.Figure(figsize=(9.6, 3.8), layout="constrained")
    by_step, by_position = figure.subplots(1, 2)
    for number, (name, run) in enumerate(runs.items()):
        color, losses = f"C{number}", np.array([*run["losses"].values()])
        steps = np.array([*map(int, run["losses"])])
        width = max(1, min(SMOOTH, len(losses) // 4))
        smooth = np.convolve(losses, np.ones(width) / width, "valid")
        by_step.plot(steps, losses, color=color, alpha=0.15, linewidth=0.8)
        by_step.plot(steps[width - 1 :], smooth, color=color, label=f"{name}: {run['tokens_per_second']:,.0f} tokens/s")
        positions = [(place, loss) for place, loss in run["positions"] if loss is not None]
        by_position.plot(*np.transpose(positions or [(np.nan, np.nan)]), color=color, marker=".", label=name)
    by_step.set(xlabel="step", ylabel="loss, nats a byte", title="Training")
    by_position.set(xlabel="position in the context, bytes", title="Held-out documents")
    for axes in (by_step, by_position):
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def print_means(runs: Mapping[str, Mapping[str, Any]], steps: int = 100) -> None:
    """The mean loss of every so many steps, and that of held-out documents by parts of the context."""
    for name, run in runs.items():
        losses = [run["losses"][step] for step in sorted(run["losses"], key=int)]
        means = [f"{np.mean(losses[start : start + steps]):.3f}" for start in range(0, len(losses), steps)]
        print(f"{name}, every {steps} steps: {' '.join(means)}")
        known = [loss for _, loss in run["positions"] if loss is not None]
        print(f"{name}, held out, by position: {' '.join(f'{loss:.2f}' for loss in known)}")


if __name__ == "__main__":
    if len(sys.argv) < 3 or not all("=" in argument for argument in sys.argv[2:]):
        raise SystemExit(__doc__)
    named = (argument.split("=", 1) for argument in sys.argv[2:])
    found = {name: json.loads(Path(path).read_text()) for name, path in named}
    draw(found, Path(sys.argv[1]))
    print_means(found)
