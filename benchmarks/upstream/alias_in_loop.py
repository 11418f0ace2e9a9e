# SPDX-License-Identifier: Apache-2.0
"""Whether XLA for GPUs keeps the alias of an FFI call whose result a loop stacks. Needs JAX's CUDA plugin, and no GPU.

An output that aliases an operand begins with what the operand holds. With JAX 0.11.2 and 0.12.0.1 the call and the
update of the stack become one fusion, and the output is a part of the stack, which holds something else.
`launch/compiled.py` of ringattn-triton works round it. The exit status is 1 once it may go.
"""

import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from jaxlib import gpu_triton

sys.path.insert(0, str(Path(__file__).parents[1]))
from targets import H200

nothing = ".version 8.0 .target sm_90 .address_size 64 .visible .entry kernel(.param .u64 x, .param .u64 y) { ret; }"
kernel = gpu_triton.TritonKernel("kernel", 4, 1, 0, nothing, "", 90)
launch = gpu_triton.TritonKernelCall(kernel, 1, 1, 1, [gpu_triton.create_array_parameter(0, 16)] * 2)
continued = jax.ffi.ffi_call(
    "triton_kernel_call_ffi", jax.ShapeDtypeStruct((1024,), jnp.float32), input_output_aliases={0: 0}
)
opaque = zlib.compress(launch.to_proto("kernel", b""))
(device,) = topologies.get_topology_desc("x", "cuda", topology="1x1x1", target_config=H200).devices
rows = jax.ShapeDtypeStruct((8, 1024), jnp.float32, sharding=SingleDeviceSharding(device))


def kept(after: Callable[[jax.Array], jax.Array]) -> bool:
    """Whether the call stays out of the fusion that updates the stack; `after` is applied to its result."""
    stacked = jax.jit(lambda x: jax.lax.map(lambda row: after(continued(jnp.sin(row), opaque=opaque)), x))
    text = stacked.trace(rows).lower(lowering_platforms=("cuda",)).compile().as_text() or ""
    calls = [part for part in text.split("\n}\n") if "output_to_operand_aliasing" in part]
    assert calls, "the compiled program has no call with an alias"
    return not any("dynamic-update-slice(" in part for part in calls)


assert kept(jax.lax.optimization_barrier), "a barrier keeps the alias no more"
kept_anyway = kept(lambda x: x)
print(f"JAX {jax.__version__}: {'kept' if kept_anyway else 'lost'}")
sys.exit(kept_anyway)
