# SPDX-License-Identifier: Apache-2.0
"""A call is right whatever was called before it in the process, in another thread, or with an error."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import jax
import pytest
from ringattn_core.contract.features import Feature

from ringattn_conformance import ranks, tiers
from ringattn_conformance.cases import Case
from ringattn_conformance.outcomes import agrees, declared, supports
from ringattn_conformance.ranks import Arrays, Placement, place

CASE = Case(
    "sequence", q_length=40, kv_length=40, heads=4, causal=True, window=(17, 4), chunk=20, soft_cap=3.0, scale=0.4,
    bias="N", dropout=0.1, lse=True,
)  # fmt: skip
CHANGES: dict[str, Any] = {
    "dropout": 0.5, "window": (3, 1), "chunk": 8, "soft_cap": 8.0, "scale": -0.9, "causal": False, "lse": False,
    "precision": "highest", "bias_dtype": "bfloat16", "max_logits": True, "fused_backward": True, "block_size": 16,
}  # fmt: skip
"""By option, another value: all shapes stay, and all dtypes but that of the bias."""
OF_CORE = ("dropout", "window", "soft_cap", "scale")


def _changed(backend: str, option: str) -> Case:
    """The case with another value of the option, so that the option alone decides the result."""
    case = dataclasses.replace(CASE, **{option: CHANGES[option]})
    if option == "causal":
        case = dataclasses.replace(case, chunk=None)
    return declared(backend, dataclasses.replace(case, name=f"sequence-other-{option}"))


@tiers.mark(tiers.CORE, "core")
@pytest.mark.parametrize("options", [OF_CORE, tuple(CHANGES)], ids=["core", "every"])
def test_a_call_with_one_option_changed_and_then_the_first_again(ringattn_backend: str, options: tuple[str, ...]):
    """A kernel or a program that is kept under too short a key answers a call with the options of another."""
    first = declared(ringattn_backend, CASE)
    for case in (first, *(_changed(ringattn_backend, option) for option in options), first):
        agrees(place(case, Placement(1), ringattn_backend))


@tiers.core
def test_two_threads_may_call_at_once(ringattn_backend: str):
    cases = [declared(ringattn_backend, CASE), _changed(ringattn_backend, "dropout")]
    together, device = Barrier(len(cases)), ranks.rotated_devices()[0]

    def call(case: Case) -> None:
        together.wait()
        with jax.default_device(device):
            agrees(place(case, Placement(1), ringattn_backend))

    with ThreadPoolExecutor(len(cases)) as pool:
        for done in [pool.submit(call, case) for case in cases]:
            done.result()


class Stopped(Exception):
    """Ends a call while JAX traces it."""


@tiers.core
def test_a_call_after_one_that_failed(ringattn_backend: str):
    """A call stops while its forward pass is traced, a second while its backward pass is; the same call then works."""
    placed = place(declared(ringattn_backend, CASE), Placement(1), ringattn_backend)

    @jax.custom_vjp
    def stopping(x: jax.Array) -> jax.Array:
        return x

    def stop(_: Any, dx: jax.Array) -> tuple[jax.Array]:
        raise Stopped

    stopping.defvjp(lambda x: (x, None), stop)

    def forward(operands: Arrays, fixed: Arrays) -> Arrays:
        placed.local(operands, fixed)
        raise Stopped

    def backward(operands: Arrays, fixed: Arrays) -> Arrays:
        return placed.local(operands | {"q": stopping(operands["q"])}, fixed)

    for local, gradients in ((forward, False), (backward, True)):
        if not gradients or supports(ringattn_backend, Feature.GRADIENTS):
            with pytest.raises(Stopped):
                ranks.run(placed, gradients, local)
    agrees(placed)
