# SPDX-License-Identifier: Apache-2.0
"""What `fused_backward=True`, which adds dq in any order, changes on one GPU: gradients, and the time of a step."""

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from interleaved import ON_A_DEVICE, medians
from programs import ours, with_gradients
from workloads import GROUPED, LONG, MAIN, NARROW, PACKED, Shape

DOCUMENTS: Final = jnp.arange(PACKED.tokens, dtype=jnp.int32)[None] // 2048
CASES: Final[dict[str, tuple[Shape, dict[str, Any]]]] = {
    "causal": (MAIN, {"causal": True}),
    "full": (MAIN, {}),
    "grouped": (GROUPED, {"causal": True}),
    "d64": (NARROW, {"causal": True}),
    "documents": (PACKED, {"causal": True, "q_segment_ids": DOCUMENTS, "kv_segment_ids": DOCUMENTS}),
    "window": (LONG, {"causal": True, "sliding_window": (4095, 0)}),
    "ragged": (dataclasses.replace(MAIN, tokens=3001), {}),
    "ragged d64 grouped": (Shape(2, 3001, 8, 2, 64), {"causal": True}),
}


def difference(got: jax.Array, want: jax.Array) -> float:
    """The relative difference in the Frobenius norm."""
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return float(jnp.linalg.norm((got - want).ravel()) / jnp.linalg.norm(want.ravel()))


def compiled(shape: Shape, options: dict[str, Any], fused: bool) -> Callable[[], tuple[jax.Array, ...]]:
    """The output, dq, dk and dv of a call, as a program without arguments."""
    inputs = shape.arrays()
    attention = ours(backend="triton", fused_backward=fused, **options)
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
        programs = {fused: compiled(*CASES[name], fused) for fused in (False, True)}
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
