# SPDX-License-Identifier: Apache-2.0
"""What `fused_backward=True`, which adds dq in any order, changes on one GPU: gradients, and the time of a step."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Final

import jax
import jax.numpy as jnp
from interleaved import ON_A_DEVICE, medians
from programs import ours, with_gradients
from workloads import CASES as WORKLOADS
from workloads import MAIN, Shape, Workload

CASES: Final = {name: WORKLOADS[name] for name in ("causal", "full", "grouped", "d64", "documents", "window")} | {
    "ragged": Workload(dataclasses.replace(MAIN, tokens=3001), causal=False),
    "ragged d64 grouped": Workload(Shape(2, 3001, 8, 2, 64)),
}


def difference(got: jax.Array, want: jax.Array) -> float:
    """The relative difference in the Frobenius norm."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm((got - want).ravel()) / jnp.linalg.norm(want.ravel()))


def compiled(case: Workload, fused: bool) -> Callable[[], tuple[jax.Array, ...]]:
    """The output, dq, dk and dv of a call, as a program without arguments."""
    inputs = case.shape.arrays()

    def attention(*arrays: jax.Array) -> jax.Array:
        # The options are made while the program is traced, so that XLA does not see the ids.
        return ours(backend="triton", fused_backward=fused, **case.options())(*arrays)

    program = jax.jit(with_gradients(attention)).lower(*inputs).compile()
    return lambda: program(*inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        raise SystemExit("this benchmark needs a GPU, and JAX sees none in this process")
    for name in arguments.only:
        programs = {fused: compiled(CASES[name], fused) for fused in (False, True)}
        pairs = zip(programs[True](), programs[False](), strict=True)
        apart = max(difference(one_pass, two_passes) for one_pass, two_passes in pairs)
        time = medians({str(fused): program for fused, program in programs.items()}, arguments.rounds, ON_A_DEVICE)
        print(
            f"{name}: {1e3 * time['False']:.3f} ms by default, {1e3 * time['True']:.3f} ms with fused_backward=True "
            f"({time['True'] / time['False']:.2f}); results differ by at most {apart:.5f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
