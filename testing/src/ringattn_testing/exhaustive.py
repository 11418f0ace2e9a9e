# SPDX-License-Identifier: Apache-2.0
"""Cases that take seconds, and for which another case stands: `nox -s tests` leaves them to `nox -s exhaustive`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def in_tests(kept: Callable[..., bool], cases: Iterable[tuple[Any, ...]]) -> list[Any]:
    """The cases for `pytest.mark.parametrize`; those for which `kept(*case)` is false are marked as `exhaustive`."""
    return [pytest.param(*case, marks=() if kept(*case) else pytest.mark.exhaustive) for case in cases]
