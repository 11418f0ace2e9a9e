# SPDX-License-Identifier: Apache-2.0
"""How many bundles the kernels of a pair of tiles take on a TPU, beside JAX's splash attention and tokamax's.

`python benchmarks/tpu_static.py --chip v6e --head 128` needs no TPU, only libtpu: it compiles causal attention with
gradients ahead of time and reads the schedules that the compiler writes. A bundle is what a core issues in one cycle.
The tables leave out transfers and stalls, so they rank kernels and are no times. The tiles have 1,024 x 1,024 tokens,
of which 512 keys are computed at a time.
"""

import argparse
import importlib
import importlib.util
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import ringattn_tpu
from interleaved import with_gradients
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from ringattn_core import BwdParams, FwdParams

CHIPS = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}
TILE, PART = 1024, 512
BLOCKS = ("block_q", "block_kv", "block_q_dkv", "block_kv_dkv")
PARTS = ("block_kv_compute", "block_kv_dkv_compute")
SIZES = dict.fromkeys(BLOCKS, TILE) | dict.fromkeys(PARTS, PART)
BUNDLE = re.compile(r"\s*(?:0x)?[0-9a-f]+\s+(.*?): >*\s*\{")


class Body(NamedTuple):
    """A run of bundles without a branch: how many there are, and how many of them start a matrix product."""

    bundles: int
    products: int


def with_ours(part: int) -> Callable[..., Any]:
    sizes: dict[str, Any] = {"q_blocksize": TILE, "kv_blocksize": TILE, "extra": (("part", part),)}
    params = {"fwd_params": FwdParams(**sizes), "bwd_params": BwdParams(**sizes)}
    return lambda *arrays: ringattn_tpu.ring_attention(*arrays, axis_name=(), causal=True, **params)


def with_heads_first(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """`kernel` of arrays `[N, T, H]` as a function of ours, `[1, T, N, H]`."""
    return lambda *arrays: jnp.swapaxes(kernel(*(jnp.swapaxes(x[0], 0, 1) for x in arrays)), 0, 1)[None]


def with_splash(tokens: int) -> Callable[..., Any]:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    mask = splash.MultiHeadMask([splash.CausalMask((tokens, tokens))])
    sizes = splash.BlockSizes(**SIZES, use_fused_bwd_kernel=True)
    return with_heads_first(splash.make_splash_mha_single_device(mask, block_sizes=sizes))


def with_tokamax(tokens: int) -> Callable[..., Any]:
    folder = "tokamax._src.ops.experimental.tpu.splash_attention"
    splash, masks = (importlib.import_module(f"{folder}.splash_attention_{name}") for name in ("kernel", "mask"))
    mask = masks.CausalMask((tokens, tokens))
    return with_heads_first(splash.make_splash_mha_single_device(mask, config=splash.SplashConfig(**SIZES)))


def compile_for(chip: str, attend: Callable[..., Any], tokens: int, head: int) -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices
    mesh, whole = Mesh(np.array(devices[:1]), ("sp",)), PartitionSpec()
    array = jax.ShapeDtypeStruct((1, tokens, 1, head), jnp.bfloat16, sharding=NamedSharding(mesh, whole))
    # In the mesh the kernels know their chip.
    step = jax.shard_map(with_gradients(attend), mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    jax.jit(step).lower(*[array] * 4).compile()


def bodies(schedule: Path) -> list[Body]:
    """The runs of a kernel's final schedule that compute matrix products, in the order of the program."""
    found = [Body(len(run), sum("vmatmul" in bundle for bundle in run)) for run in _runs(schedule.read_text())]
    return [body for body in found if body.products]


def _runs(text: str) -> Iterator[list[str]]:
    """The bundles of a schedule, cut at labels and after branches."""
    run: list[str] = []
    for line in text.splitlines():
        bundle = BUNDLE.match(line)
        if bundle is None:
            if run:  # a bundle that goes on in this line
                run[-1] += line
            continue
        if bundle[1]:
            yield run
            run = []
        run.append(line)
        if "sbr." in line:
            yield run
            run = []
    yield run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", choices=CHIPS, default="v6e")
    parser.add_argument("--head", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=4096, help="16384 makes our backward pass two kernels")
    parser.add_argument("--part", type=int, default=PART, help="how many keys our kernels compute at a time")
    parser.add_argument("--only", choices=("ours", "splash", "tokamax"))
    given = parser.parse_args()
    # libtpu reads these when it is loaded: where to write schedules, and what it would ask the metadata server.
    kept = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    folder = Path(kept.name)
    os.environ["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
    os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_LOG_DIR": "disabled"}
    os.environ |= {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}
    os.environ["RINGATTN_TPU_INTERPRET"] = "1"  # the backend is then there on a CPU
    jax.config.update("jax_platforms", "cpu")
    programs = {"ours": lambda: with_ours(given.part), "splash": lambda: with_splash(given.tokens)}
    if importlib.util.find_spec("tokamax"):
        programs["tokamax"] = lambda: with_tokamax(given.tokens)
    print(f"JAX {jax.__version__}, {given.chip}, heads of {given.head}: bundles of each run with matrix products")
    for name, program in programs.items():
        if given.only not in (None, name):
            continue
        before = set(folder.iterdir())
        compile_for(given.chip, program(), given.tokens, given.head)
        for schedule in sorted({*folder.glob("*[0-9]-final_bundles.txt")} - before):
            if runs := bodies(schedule):
                kernel = re.sub(r"^\d+-|\.?\d*-\d+-final_bundles.txt$", "", schedule.name)
                print(f"  {name}, {kernel}: {', '.join(f'{body.bundles:,}' for body in runs)}", flush=True)


if __name__ == "__main__":
    main()
