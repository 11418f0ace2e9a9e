# SPDX-License-Identifier: Apache-2.0
"""The options of a run of the suite: `--ringattn-NAME` in pytest, `--NAME` in the command `ringattn-conformance`."""

import math
from pathlib import Path
from typing import Any, Final

from . import tiers

BACKEND: Final = "--ringattn-backend"


def _positive(text: str) -> float:
    """The text as a positive, finite number; raises ValueError otherwise."""
    if 0 < (found := float(text)) < math.inf:
        return found
    raise ValueError(text)


OPTIONS: Final[dict[str, dict[str, Any]]] = {
    "tier": {
        "choices": list(tiers.TIERS),
        "default": tiers.FULL,
        "help": "how much is tried (default: %(default)s). " + "; ".join(f"{n}: {x}" for n, x in tiers.TIERS.items()),
    },
    "tolerance-factor": {
        "type": _positive,
        "default": 1.0,
        "metavar": "X",
        "help": "multiply every tolerance; more than 1 spoils the certificate",
    },
    "expectations": {
        "type": Path,
        "metavar": "PATH",
        "help": "the backend's pyproject.toml, whose [tool.ringattn-conformance] names the failures that are expected "
        "(default: ./pyproject.toml, where there is one)",
    },
    "seed": {
        "type": int,
        "metavar": "N",
        "help": "what the calls of the day are drawn by (default: today, as in 20261126)",
    },
    "report": {"type": Path, "metavar": "FILE", "help": "write the results as JSON"},
}
"""The name of each option, and the arguments of `add_argument` for it."""


def in_pytest(values: dict[str, Any]) -> list[str]:
    """The arguments of pytest's command line that set these options; options with value `None` are left out."""
    return [word for name, x in values.items() if x is not None for word in (f"--ringattn-{name}", str(x))]
