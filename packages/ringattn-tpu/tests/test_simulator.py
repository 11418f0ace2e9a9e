# SPDX-License-Identifier: Apache-2.0
"""In the simulator of a TPU no two accesses race, whichever core takes which head, and the numbers are right.

Memory that nobody wrote is NaN there, reads out of bounds raise, and transfers happen no sooner than someone waits.
"""

import pytest
from ringattn_testing.tpu.simulated import CASES, FAULTS, simulated

TOLERANCE = 2e-5
HALVES = (tuple(CASES)[::2], tuple(CASES)[1::2])


@pytest.mark.parametrize(("half", "case"), [(number, case) for number, half in enumerate(HALVES) for case in half])
def test_the_kernels_race_nowhere_and_compute_what_they_should(half: int, case: str, once):
    found = once(f"simulated-{half}", lambda: simulated("case", *HALVES[half]))[case]
    assert not found["raced"], f"{case}: the simulator found a race"
    wrong = {name: error for name, error in found["wrong"].items() if not error <= TOLERANCE}
    assert not wrong, f"{case}: off by more than {TOLERANCE} of the largest element: {wrong}"


def test_a_race_is_found():
    assert simulated("fault", *FAULTS) == dict(zip(FAULTS, (False, True, True), strict=True))
