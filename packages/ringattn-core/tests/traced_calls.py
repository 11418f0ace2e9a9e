# SPDX-License-Identifier: Apache-2.0
"""Looks into traced programs, and makes JAX trace calls of attention anew where a test has changed how it traces."""

from collections.abc import Iterator
from typing import Any

from jax.extend.core import jaxprs_in_params
from ringattn_core.call import sharding
from ringattn_core.ring import engine
from ringattn_core.strategies import cache


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of all jaxprs inside it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)


def bodies(jaxpr: Any) -> list[Any]:
    """All jaxprs inside a jaxpr, each once."""
    inner = (body for equation in equations(jaxpr) for body in jaxprs_in_params(equation.params))
    return list({id(body): body for body in inner}.values())


def forget_traced_calls() -> None:
    """`jax.clear_caches` would do as well, but then every later test compiles its small operations again."""
    for traced in (engine._attend, cache.attend, sharding._run):
        traced.clear_cache()
