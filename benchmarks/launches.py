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
from workloads import SUITES

H200: Final = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 150978434048 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""
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
