# SPDX-License-Identifier: Apache-2.0
"""A process of tests that has become large drops its compiled programs."""

import jax
import pytest
from ringattn_conformance import memory


@pytest.mark.parametrize("large", [True, False])
def test_programs_are_dropped_only_by_a_process_that_is_large(large: bool, monkeypatch: pytest.MonkeyPatch):
    times = []

    @jax.jit
    def traced(x: jax.Array) -> jax.Array:
        times.append(x)
        return x

    monkeypatch.setattr(memory, "_limit", -1.0 if large else 1e18)
    traced(1.0)
    memory.drop_programs()
    traced(1.0)
    assert len(times) == (2 if large else 1)


def test_a_process_that_stays_large_does_not_drop_its_programs_at_each_test(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "_limit", -1.0)
    memory.drop_programs()
    monkeypatch.setattr(jax, "clear_caches", lambda: pytest.fail("dropped again"))
    memory.drop_programs()
