# SPDX-License-Identifier: Apache-2.0
"""Whether a call of the suite catches a kernel."""

import numpy as np
import pytest
from ringattn_conformance import comparison
from ringattn_conformance.cases import Case
from ringattn_conformance.ranks import Placement

from ringattn_testing.conformance.numpy_ring import Dense, Fused, OneAfterAnother, run, whole


def size(call: tuple[Case, Placement]) -> int:
    """The scores of a call times its ranks: about in proportion to its time. Tests try small calls first."""
    case, placement = call
    return case.batch * case.heads * case.q_length * case.kv_length * placement.ring


def catches(call: tuple[Case, Placement], kernel: Dense) -> bool:
    """Whether a result of this kernel is beyond its tolerance."""
    block, _ = whole(*call)
    with np.errstate(all="ignore"):
        got = run(*call, kernel)
    try:
        comparison.check(got, block.case.answer, block.case)
    except AssertionError:
        return True
    return False


def refused(call: tuple[Case, Placement], monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a right kernel is refused: a fused one in half precision, or in float32 by half of every tolerance."""
    kernel, factor = (OneAfterAnother(), 0.5) if call[0].dtype == "float32" else (Fused(), 1.0)
    monkeypatch.setattr(comparison, "factor", factor)
    return catches(call, kernel)
