# SPDX-License-Identifier: Apache-2.0
"""What a call launches on an H200, as XLA compiles it; no GPU is needed, but JAX's CUDA plugin and Triton are.

`JAX_PLATFORMS=cpu python benchmarks/launches.py [CASE ...]`, with the cases of `call_rivals.py`. Prints the kernels of
each program in order, and their number: what XLA makes (fusions, copies) and what the backend launches (`ffi_call`).
"""

import re
import sys
from typing import Any, Final

import jax
import jax.numpy as jnp
from interleaved import ours, with_gradients
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from ringattn_triton.launch import compiling_for
from targets import H200
from workloads import SUITES

_OPERATION: Final = re.compile(r"\s*(?:ROOT )?%(\S+) = .*? (fusion|custom-call|copy|reduce|sort|while)\(")


def launches(name: str, part: str, device: Any) -> list[str]:
    """The names of what a case launches."""
    case = SUITES["gpu"][name]
    arrays = jax.eval_shape(case.shape.arrays) if part == "forward+backward" else jax.eval_shape(case.shape.arrays)[:3]
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=SingleDeviceSharding(device)) for x in arrays]
    attend = ours(backend="triton", **case.options())
    if case.sinks:
        attend = ours(backend="triton", softmax_aux=jnp.zeros(case.shape.heads), **case.options())
    run = with_gradients(attend) if part == "forward+backward" else attend
    with compiling_for(90):
        text = jax.jit(run).trace(*given).lower(lowering_platforms=("cuda",)).compile().as_text() or ""
    return [found[1] for line in text[text.index("ENTRY") :].splitlines() if (found := _OPERATION.match(line))]


def main() -> None:
    (device,) = topologies.get_topology_desc("x", "cuda", topology="1x1x1", target_config=H200).devices
    names = sys.argv[1:] or [name for name, case in SUITES["gpu"].items() if not case.decode]
    jax.local_devices = lambda *_, **__: [device]  # what the backend asks before it takes a call
    jax.default_backend = lambda: "gpu"
    for name in names:
        for part in SUITES["gpu"][name].parts:
            found = launches(name, part, device)
            print(f"{name}, {part}: {len(found)}: {', '.join(found)}", flush=True)


if __name__ == "__main__":
    main()
