# SPDX-License-Identifier: Apache-2.0
"""Whether an option of a call matters: a kernel that ignores it would be beyond the tolerance."""

import dataclasses
import functools
from typing import Any, Final

import numpy as np
from ringattn_conformance import oracle
from ringattn_conformance.cases import Case
from ringattn_conformance.comparison import allowed

WITHOUT: Final[dict[str, dict[str, Any]]] = {
    "causal": {"causal": False},
    "window": {"window": None},
    "chunk": {"chunk": None},
    "segments": {"q_segments": None, "kv_segments": None},
    "positions": {"q_positions": None, "kv_positions": None},
    "ranges": {"kv_range": None},
    "selected": {"selected": None},
    "soft_cap": {"soft_cap": None},
    "scale": {"scale": None},
    "sinks": {"sinks": None},
    "bias": {"bias": None},
    "slopes": {"slopes": None},
    "dropout": {"dropout": 0.0},
}
"""By option, the fields of a problem without it."""
RESULTS: Final = ("lse", "max_logits", "fused_backward", "precision")
"""Options that change no output, or only its rounding: they matter in every call."""


def problem_without(case: Case, option: str) -> oracle.Problem:
    """The problem of a call without one of its options; all arrays stay."""
    inputs = case.inputs
    if option == "dense_mask":
        seen = None if case.masks_of_heads is None else case.masks_of_heads.dense(inputs.problem)
        return dataclasses.replace(inputs.problem, seen=seen)
    if option == "builder":
        return dataclasses.replace(inputs.problem, seen=inputs.dense_mask)
    return dataclasses.replace(inputs.problem, **WITHOUT[option])


@functools.lru_cache(maxsize=64)
def answer(case: Case) -> oracle.Answer:
    """The oracle's answer without gradients."""
    return oracle.attend(case.inputs.problem)


def matters(case: Case, option: str) -> bool:
    """Whether a kernel that ignores the option is beyond five times the tolerance of the output or of the lse."""
    if option in RESULTS:
        return True
    want, without = answer(case), oracle.attend(problem_without(case, option))
    for name in ("out", "lse") if case.lse else ("out",):
        x, y = want.by_name[name], without.by_name[name]
        with np.errstate(invalid="ignore"):
            error = np.where(x == y, 0.0, np.abs(x - y))
        tolerance = allowed(name, case.dtype, x, want.largest, want.uncapped)
        if np.nan_to_num(error, nan=np.inf).max() > 5 * tolerance:
            return True
    return False
