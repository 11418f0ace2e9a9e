# SPDX-License-Identifier: Apache-2.0
"""How the tests of the suite run: on which device, with which tolerances, and how much XLA optimises."""

from collections.abc import Iterator
from typing import Final

import jax
import pytest
from ringattn_core.backends import discovery

from ringattn_conformance import comparison, memory, ranks, tiers

OPTIMISED: Final = "test_numerics"
"""The module whose tests always run with XLA's full optimisation, as users compile."""


@pytest.fixture(autouse=True)
def optimisation(request: pytest.FixtureRequest) -> Iterator[None]:
    """Turns most of XLA's optimisation off on the CPU, except in the `OPTIMISED` module and the exhaustive tier."""
    module = request.module.__name__.rpartition(".")[2]
    exhaustive = request.config.getoption("ringattn_tier") == tiers.EXHAUSTIVE
    quick = not exhaustive and jax.default_backend() == "cpu" and module != OPTIMISED
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", quick or before)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(autouse=True)
def tolerances_of_the_backend(ringattn_backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the tolerances for a test's backend: larger ones if it has partial results in half precision."""
    monkeypatch.setattr(comparison, "half_partials", discovery.get(ringattn_backend).descriptor().half_partials)


@pytest.fixture(autouse=True)
def device_of_the_worker() -> Iterator[None]:
    """Makes the worker's own device JAX's default, so that calls on one device are spread over all devices."""
    first = ranks.rotated_devices()[0]
    if first == jax.devices()[0]:
        yield
    else:
        with jax.default_device(first):
            yield


@pytest.fixture(autouse=True)
def programs_dropped() -> Iterator[None]:
    """After a test, if this process has become large."""
    yield
    memory.drop_programs()
