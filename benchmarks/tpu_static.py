# SPDX-License-Identifier: Apache-2.0
"""How many bundles the kernels of a pair of tiles take on a TPU, beside JAX's splash attention and tokamax's.

`python benchmarks/tpu_static.py --chip v6e --head 128` needs no TPU, only libtpu: it compiles attention with gradients
ahead of time, reads the schedules that the compiler writes, and prints rows of the table in `docs/tpu.md`. A bundle is
what a core issues in one cycle. The table leaves out transfers and stalls, so it ranks kernels and has no times. The
tiles have 1,024 x 1,024 tokens; the others compute 512 keys at a time, and ours what it chooses.
"""

import argparse
import importlib
import importlib.util
import itertools
import os
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
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


class Case(NamedTuple):
    """What a query sees beside causality, and the shapes. `group`: the query heads of the key head."""

    window: int | None = None
    documents: bool = False
    cap: float | None = None
    sinks: bool = False
    group: int = 1
    value_head: int | None = None


CASES = {
    "causal": Case(),
    "window of 1,024": Case(window=1024),
    "documents": Case(documents=True),
    "soft cap": Case(cap=50.0),
    "sinks": Case(sinks=True),
    "four heads a key head": Case(group=4),
    "values of 128": Case(value_head=128),
}


class Body(NamedTuple):
    """A run of bundles without a branch: how many there are, and how many of them start a matrix product."""

    bundles: int
    products: int


def with_ours(case: Case, tokens: int, part: int | None) -> Callable[..., Any]:
    sizes: dict[str, Any] = {"q_blocksize": TILE, "kv_blocksize": TILE}
    sizes |= {} if part is None else {"extra": (("part", part),)}
    ids = jnp.zeros((1, tokens), jnp.int32) if case.documents else None
    options = {"q_segment_ids": ids, "kv_segment_ids": ids, "logits_soft_cap": case.cap}
    options |= {} if case.window is None else {"sliding_window": (case.window - 1, 0)}
    options |= {"fwd_params": FwdParams(**sizes), "bwd_params": BwdParams(**sizes)}

    def attend(q: jax.Array, k: jax.Array, v: jax.Array, sinks: jax.Array | None = None) -> jax.Array:
        return ringattn_tpu.ring_attention(q, k, v, softmax_aux=sinks, axis_name=(), causal=True, **options)

    return attend


def with_splash(case: Case, tokens: int) -> Callable[..., Any]:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    mask = splash.MultiHeadMask([_mask(splash, case, tokens)] * case.group)
    sizes = splash.BlockSizes(**SIZES, use_fused_bwd_kernel=True)
    make = splash.make_splash_mqa_single_device if case.group > 1 else splash.make_splash_mha_single_device
    return _with_heads_first(make(mask, block_sizes=sizes, attn_logits_soft_cap=case.cap), splash, case, tokens)


def with_tokamax(case: Case, tokens: int) -> Callable[..., Any]:
    folder = "tokamax._src.ops.experimental.tpu.splash_attention"
    names = ("kernel", "mask")
    splash, masks = (importlib.import_module(f"{folder}.splash_attention_{name}") for name in names)
    config = splash.SplashConfig(**SIZES, attn_logits_soft_cap=case.cap)
    make = splash.make_splash_mqa_single_device if case.group > 1 else splash.make_splash_mha_single_device
    return _with_heads_first(make(_mask(masks, case, tokens), config=config), splash.base, case, tokens)


def _mask(masks: Any, case: Case, tokens: int) -> Any:
    shape = (tokens, tokens)
    return masks.CausalMask(shape) if case.window is None else masks.LocalMask(shape, (case.window - 1, 0), 0)


def _with_heads_first(kernel: Callable[..., Any], module: Any, case: Case, tokens: int) -> Callable[..., Any]:
    """`kernel`, of arrays `[N, T, H]` without batch, as a function of ours, `[1, T, N, H]`."""
    options = {}
    if case.documents:
        options["segment_ids"] = module.SegmentIds(jnp.zeros(tokens, jnp.int32), jnp.zeros(tokens, jnp.int32))

    def attend(*arrays: jax.Array) -> jax.Array:
        q, k, v, *sinks = arrays
        q, k, v = (jnp.swapaxes(x[0], 0, 1) for x in (q, k, v))
        k, v = (k[0], v[0]) if case.group > 1 else (k, v)
        return jnp.swapaxes(kernel(q, k, v, **options, **dict(zip(["sinks"], sinks, strict=False))), 0, 1)[None]

    return attend


def compile_for(chip: str, attend: Callable[..., Any], case: Case, tokens: int, head: int) -> None:
    devices = topologies.get_topology_desc(platform="tpu", topology_name=CHIPS[chip]).devices
    mesh, whole = Mesh(np.array(devices[:1]), ("sp",)), PartitionSpec()

    def array(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, whole))

    value_head = case.value_head or head
    arrays = [array(1, tokens, case.group, head), array(1, tokens, 1, head), array(1, tokens, 1, value_head)]
    arrays += [array(case.group, dtype=jnp.float32)] if case.sinks else []
    # In the mesh the kernels know their chip.
    step = jax.shard_map(with_gradients(attend), mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    jax.jit(step).lower(*arrays, array(1, tokens, case.group, value_head)).compile()


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


def passes(folder: Path, before: set[Path]) -> list[tuple[int, ...]]:
    """The bundles of each run of the forward kernel, and those of the backward pass, summed over its kernels."""
    found: dict[bool, list[list[int]]] = {True: [], False: []}
    for schedule in {*folder.glob("*[0-9]-final_bundles.txt")} - before:
        if runs := bodies(schedule):
            found["forward" in schedule.name or "fwd" in schedule.name].append([body.bundles for body in runs])
    return [tuple(map(sum, zip(*found[forward], strict=True))) for forward in (True, False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chip", choices=CHIPS, default=["v6e"], nargs="+")
    parser.add_argument("--head", type=int, default=[128], nargs="+")
    parser.add_argument("--case", choices=CASES, default=["causal"], nargs="+")
    parser.add_argument("--tokens", type=int, default=4096, help="16384 makes our backward pass two kernels")
    parser.add_argument("--part", type=int, help="how many tokens of a visiting tile our kernels compute at a time")
    parser.add_argument("--only", choices=("ringattn", "splash", "tokamax"))
    given = parser.parse_args()
    # libtpu reads these when it is loaded: where to write schedules, and what it would ask the metadata server.
    kept = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    folder = Path(kept.name)
    os.environ["LIBTPU_INIT_ARGS"] = (
        f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true --xla_jf_dump_llo_pass_label_regex=.*final_bundles.*"
    )
    os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1", "TPU_LOG_DIR": "disabled"}
    os.environ |= {"TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_WORKER_HOSTNAMES": "localhost"}
    os.environ["RINGATTN_TPU_INTERPRET"] = "1"  # the backend is then there on a CPU
    jax.config.update("jax_platforms", "cpu")
    programs: dict[str, Callable[[Case], Any]] = {
        "ringattn": lambda case: with_ours(case, given.tokens, given.part),
        "splash": lambda case: with_splash(case, given.tokens),
    }
    if importlib.util.find_spec("tokamax"):
        programs["tokamax"] = lambda case: with_tokamax(case, given.tokens)
    programs = {name: program for name, program in programs.items() if given.only in (None, name)}
    print(f"JAX {jax.__version__}, bundles of a pair of tiles: unmasked / masked, where a kernel has both")
    print(f"| chip, head | case | pass | {' | '.join(programs)} |\n|{'---|' * (3 + len(programs))}")
    for chip, head, name in itertools.product(given.chip, given.head, given.case):
        found = []
        for program in programs.values():
            before = set(folder.iterdir())
            compile_for(chip, program(CASES[name]), CASES[name], given.tokens, head)
            found.append(passes(folder, before))
        for which, counts in zip(("forward", "backward"), zip(*found, strict=True), strict=True):
            print(f"| {chip}, {head} | {name} | {which} | {' | '.join(in_bold(counts))} |", flush=True)


def in_bold(counts: Sequence[tuple[int, ...]]) -> list[str]:
    """The counts of each program as a cell: the least unmasked and the least masked are bold."""
    least = [min(count[which] for count in counts) for which in (0, -1)]
    cells = []
    for count in counts:
        pairs = zip((count[0], count[-1]), least, strict=True)
        first, last = (f"**{n:,}**" if n == best else f"{n:,}" for n, best in pairs)
        cells.append(first if len(count) == 1 else f"{first} / {last}")
    return cells


if __name__ == "__main__":
    main()
