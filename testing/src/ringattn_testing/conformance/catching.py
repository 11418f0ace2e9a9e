# SPDX-License-Identifier: Apache-2.0
"""Whether a call of the suite catches a kernel."""

import numpy as np
from ringattn_conformance import comparison
from ringattn_conformance.cases import Case
from ringattn_conformance.ranks import Placement

from ringattn_testing.conformance.numpy_ring import Dense, run


def size(call: tuple[Case, Placement]) -> int:
    return call[0].batch * call[0].heads * call[0].q_length


def catches(call: tuple[Case, Placement], kernel: Dense) -> bool:
    """Whether a result of this kernel is beyond its tolerance."""
    case, placement = call
    with np.errstate(all="ignore"):
        got = run(case, placement, kernel)
    try:
        comparison.check(got, case.answer, case)
    except AssertionError:
        return True
    return False
