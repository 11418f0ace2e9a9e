# SPDX-License-Identifier: Apache-2.0
"""Tokamax's kernels compile for Hopper and for Blackwell, as this backend calls them, on a machine without a GPU.

One process compiles for one of them: `pytest -k sm_100a`. Mosaic's compiler keeps the first architecture that it sees.
"""

import importlib.util
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

os.environ["JAX_PLATFORMS"] = "cpu"
# XLA reads these variables when it compiles the first kernel.
os.environ |= {"MOSAIC_GPU_DUMP_PTX": "1", "MOSAIC_GPU_DUMP_PTXAS": "1", "MOSAIC_GPU_DUMP_TO": tempfile.mkdtemp()}

# tokamax imports a profiler of 100 MB that its attention does not need.
if importlib.util.find_spec("xprof") is None:
    for name in ("xprof", "xprof.cli", "xprof.cli.tools", "xprof.cli.tools.get_kernel_stats_tool"):
        sys.modules[name] = ModuleType(name)

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import topologies
from ringattn_example_tokamax import kernel  # pyright: ignore[reportMissingImports]
from tokamax._src import mosaic_gpu  # pyright: ignore[reportMissingImports]

jax.config.update("jax_num_cpu_devices", 2)
PRODUCT = {90: "wgmma.mma_async", 100: "tcgen05.mma"}
MULTIPROCESSORS = {90: 132, 100: 148}
DEVICE = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448 shared_memory_per_core: 233472
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 fpus_per_core: 128 core_count: {cores}
  memory_bandwidth: 4800000000000 l2_cache_size: 62914560 clock_rate_ghz: 1.98 device_memory_size: 150000000000
  cuda_compute_capability {{ major: {major} minor: 0 }}
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} device_description_str: "NVIDIA"
"""


def on(architecture: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tokamax take this machine for one with such a GPU: a persistent kernel has a program for each core."""
    monkeypatch.setattr(kernel, "architecture", lambda: architecture)
    device = SimpleNamespace(core_count=MULTIPROCESSORS[architecture])
    monkeypatch.setattr(mosaic_gpu, "backend", SimpleNamespace(get_default_device=lambda: device))


@pytest.mark.parametrize("architecture", PRODUCT, ids="sm_{}a".format)
def test_a_mesh_with_an_axis_of_heads_does_not_reach_the_kernels(architecture: int, monkeypatch: pytest.MonkeyPatch):
    """Mosaic would take the axis "heads" of the grid for that of the mesh, and compute the heads of one device."""
    on(architecture, monkeypatch)
    mesh = jax.make_mesh((2,), ("heads",), axis_types=(jax.sharding.AxisType.Auto,))
    q, k, v = (jax.ShapeDtypeStruct((1, 96, 4, 64), jnp.bfloat16) for _ in range(3))

    def gradients(q, k, v):
        every = {"first": jnp.zeros((1, 1, 96), jnp.int32), "last": jnp.full((1, 1, 96), 95, jnp.int32)}
        out, lse = kernel.forward(q, k, v, scale=0.125, **every)
        return kernel.backward(q, k, v, out, lse, out, delta=lse, scale=0.125, causal=False, **every)

    split = jax.sharding.PartitionSpec(None, None, "heads")
    program = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=split, out_specs=split))
    text = program.trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu") == 3
    assert "device_id" not in text


@pytest.mark.parametrize(
    ("causal", "wide"), [(False, False), (True, False), (True, True)], ids=["ranges", "causal", "64 bits enabled"]
)
@pytest.mark.parametrize("architecture", PRODUCT, ids="sm_{}a".format)
def test_both_passes_compile(architecture: int, causal: bool, wide: bool, monkeypatch: pytest.MonkeyPatch):
    cores = MULTIPROCESSORS[architecture]
    on(architecture, monkeypatch)
    described = DEVICE.format(cores=cores, major=architecture // 10)
    topology = topologies.get_topology_desc("", "cuda", target_config=described, topology="1x1x1")
    on_it = jax.sharding.SingleDeviceSharding(topology.devices[0])
    shapes = [
        ((1, 200, 4, 128), jnp.bfloat16),
        *[((1, 200, 2, 128), jnp.bfloat16)] * 2,
        *[((1, 1, 200), jnp.int32)] * 2,
    ]
    arrays = [jax.ShapeDtypeStruct(shape, dtype, sharding=on_it) for shape, dtype in shapes]

    def both(q, k, v, first, last):
        options = {"scale": 0.125, "first": first, "last": last, "causal": causal}
        out, lse = kernel.forward(q, k, v, **options)
        return kernel.backward(q, k, v, out, lse, out, delta=lse, **options)

    dumped = Path(os.environ["MOSAIC_GPU_DUMP_TO"])
    before = {*dumped.glob("*.ptx")}
    with jax.enable_x64(wide):
        jax.jit(both).trace(*arrays).lower().compile()
    made = {*dumped.glob("*.ptx")} - before
    texts = [path.read_text() for path in made]
    assert len(texts) == 3  # the forward kernel, that of dq, and that of dk and dv
    assert all(PRODUCT[architecture] in text and f".target sm_{architecture}a" in text for text in texts)
    assert all("registers" in path.with_suffix(".ptxas").read_text() for path in made)  # of the assembler's report
