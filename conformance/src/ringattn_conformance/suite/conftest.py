# SPDX-License-Identifier: Apache-2.0
"""How hard XLA works for the suite: on a CPU most of the time would go into optimising programs that run once."""

from collections.abc import Iterator
from typing import Final

import jax
import pytest

from ringattn_conformance import tiers

OPTIMISED: Final = ("test_collectives", "test_determinism", "test_numerics")
"""Modules whose promises are about the program as users run it."""


@pytest.fixture(autouse=True)
def optimisation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Unoptimised machine code, except for those modules, in the exhaustive tier, and off the CPU."""
    module = request.module.__name__.rpartition(".")[2]
    exhaustive = request.config.getoption("ringattn_tier") == tiers.EXHAUSTIVE
    quick = not exhaustive and jax.default_backend() == "cpu" and module not in OPTIMISED
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", quick or before)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def ringattn_largest_ring(request: pytest.FixtureRequest) -> int:
    """How many ranks the rotation of cases may use."""
    return request.config.option.ringattn_largest_ring
