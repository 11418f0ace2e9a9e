# SPDX-License-Identifier: Apache-2.0
"""Looks into traced programs, and makes JAX trace calls of attention anew where a test has changed how it traces."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import Literal, jaxprs_in_params
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


class Order(NamedTuple):
    """What permutes and kernels of a program wait for. Kernels have numbers in the order of the program.

    `sends` has for each permute its mesh axis, the kernels that end before it begins, and the first kernel that waits
    for it. `keys` has for each kernel the kernels that end before it can read its keys.
    """

    sends: list[tuple[str, set[int], int | None]]
    keys: list[set[int]]


def order_of(jaxpr: Any) -> Order:
    waits: dict[Any, tuple[set[int], set[int]]] = {}
    sends, keys, first = [], [], {}
    for equation in jaxpr.eqns:
        inputs = [x for x in equation.invars if not isinstance(x, Literal)]
        kernels, arrived = (set().union(*(waits[x][part] for x in inputs if x in waits)) for part in (0, 1))
        if equation.primitive.name == "ppermute":
            arrived |= {len(sends)}
            sends.append((equation.params["axis_name"][0], kernels))
        if equation.primitive.name == "custom_vmap_call":
            first = dict.fromkeys(arrived, len(keys)) | first
            kernels = kernels | {len(keys)}
            keys.append(set().union(*(waits[x][0] for x in inputs if x in waits and x.aval.ndim == 5)))
        waits |= dict.fromkeys(equation.outvars, (kernels, arrived))
    return Order([(*send, first.get(number)) for number, send in enumerate(sends)], keys)


def forget_traced_calls() -> None:
    """`jax.clear_caches` would do as well, but then every later test compiles its small operations again."""
    for traced in (engine._attend, cache.attend, sharding._run):
        traced.clear_cache()
