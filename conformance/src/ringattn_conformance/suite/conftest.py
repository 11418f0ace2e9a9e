# SPDX-License-Identifier: Apache-2.0
"""How much XLA optimises the programs of the suite: most run once, and compiling them takes the most time."""

from collections.abc import Iterator
from typing import Final

import jax
import pytest

from ringattn_conformance import tiers

OPTIMISED: Final = ("test_collectives", "test_determinism", "test_numerics")
"""Modules that test the program as users compile it."""


@pytest.fixture(autouse=True)
def optimisation(request: pytest.FixtureRequest) -> Iterator[None]:
    """No optimisation on the CPU, except for those modules and in the exhaustive tier."""
    module = request.module.__name__.rpartition(".")[2]
    exhaustive = request.config.getoption("ringattn_tier") == tiers.EXHAUSTIVE
    quick = not exhaustive and jax.default_backend() == "cpu" and module not in OPTIMISED
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", quick or before)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
