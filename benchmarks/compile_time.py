# SPDX-License-Identifier: Apache-2.0
"""How long a causal ring of 8 with gradients takes to trace and to compile."""

import argparse
import time

import jax
import numpy as np
from interleaved import Claim, ours, report, with_gradients
from jax.sharding import Mesh, NamedSharding, PartitionSpec

RING = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=32768)
    tokens = parser.parse_args().tokens
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", RING)
    mesh = Mesh(np.array(jax.devices()), ("sp",))
    split = NamedSharding(mesh, PartitionSpec(None, "sp"))
    query = jax.ShapeDtypeStruct((1, tokens, 8, 64), "float32", sharding=split)
    key = jax.ShapeDtypeStruct((1, tokens, 2, 64), "float32", sharding=split)

    step = with_gradients(ours(causal=True, mesh=mesh, axis_name="sp"))
    start = time.perf_counter()
    lowered = jax.jit(step).lower(query, key, key, query)
    traced = time.perf_counter()
    lowered.compile()
    end = time.perf_counter()
    raw = {"trace and lower, seconds": traced - start, "compile, seconds": end - traced}
    report("compile_time.py", [Claim("a causal ring of 8 with gradients", end - start, "<=", 20, "s")], raw)


if __name__ == "__main__":
    main()
