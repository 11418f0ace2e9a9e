# SPDX-License-Identifier: Apache-2.0
"""A kernel is one operation of a JAX program: in a ring, with errors that name it, on a CPU or for a GPU."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from ringattn_core import ring_attention
from ringattn_core.masks import Causal, Document, Local, Predicate, Prefix
from ringattn_testing.triton import small_kernels
from ringattn_testing.triton.compile_reports import launches
from ringattn_triton.launch import compiled, compiling_for, disk_cache, launch
from ringattn_triton.launch.compiled import compile_kernel
from ringattn_triton.launch.target import capability, interpreting
from triton.backends.compiler import GPUTarget

TILE = 32


def like(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def ring_of(ranks):
    return jax.sharding.Mesh(np.array(jax.devices()[:ranks]), ("ring",))


def added(x, total):
    constants = {"N": x.size, "TILE": TILE}
    grid = (-(-x.size // TILE),)
    return launch(
        small_kernels.added, [x, total], [like(total)], grid=grid, warps=4, stages=1, aliases={1: 0}, **constants
    )[0]


@pytest.fixture
def x():
    return jnp.asarray(np.random.default_rng(0).standard_normal(100), jnp.float32)


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("size", [64, 1 << 18])
def test_a_ring_of_launches_and_permutes_runs(check_vma, size):
    """Large operands too: other callbacks hang there, waiting for threads that wait for them."""
    mesh = ring_of(4)
    permutation = [(i, (i + 1) % 4) for i in range(4)]
    x = jnp.arange(4 * size, dtype=jnp.float32) % 97

    def shard(x):
        def step(_, carry):
            total, x = carry
            return wide(x, total), jax.lax.ppermute(x, "ring", permutation)

        def wide(x, total):
            constants = {"N": x.size, "TILE": size // 2}
            return launch(
                small_kernels.added, [x, total], [like(x)], grid=(2,), warps=4, stages=1, aliases={1: 0}, **constants
            )[0]

        zeros = jnp.zeros_like(x)
        return jax.lax.fori_loop(0, 4, step, (zeros, x))[0]

    ring = jax.jit(jax.shard_map(shard, mesh=mesh, in_specs=P("ring"), out_specs=P("ring"), check_vma=check_vma))
    np.testing.assert_array_equal(ring(x).reshape(4, size), jnp.tile(x.reshape(4, size).sum(0), (4, 1)))


def test_an_error_in_a_kernel_reaches_the_caller_with_its_name(x):
    constants = {"N": 100, "TILE": TILE, "FAULT": "load past the end"}
    with pytest.raises(Exception, match=r"kernel faulty: program .3, 0, 0. loads element 127 of operand 'X'"):
        jax.block_until_ready(
            launch(small_kernels.faulty, [x, x], [like(x)], grid=(4,), warps=4, stages=1, **constants)
        )


def test_an_error_on_one_device_of_a_ring_is_logged_and_does_not_hang_the_others(caplog):
    def shard(x):
        out = launch(small_kernels.jumping, [x], [like(x)], grid=(1,), warps=4, stages=1, SIZE=16)[0]
        return jax.lax.ppermute(out, "ring", [(0, 1), (1, 0)])

    ring = jax.jit(jax.shard_map(shard, mesh=ring_of(2), in_specs=P("ring"), out_specs=P("ring")))
    got = ring(jnp.zeros(32, jnp.float32).at[20].set(99.0))
    assert jnp.isnan(got[:16]).all() and (got[16:] == 0).all()
    assert "kernel jumping failed on one of 2 devices" in caplog.text
    assert "program (0, 0, 0) loads element 99 of operand 'X'" in caplog.text


def test_an_alias_is_one_buffer_of_the_compiled_program(x):
    with compiling_for(80):
        text = jax.jit(added).trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
    (line,) = [line for line in text.splitlines() if "custom_call @triton_kernel_call_ffi" in line]
    assert "output_operand_alias" in line and "operand_index = 1" in line


@pytest.mark.parametrize("alias", [True, False])
def test_an_aliased_output_in_a_loop_is_behind_a_barrier(x, alias):
    """Without the barrier XLA for GPUs writes the result into the stack: benchmarks/upstream/alias_in_loop.py."""
    aliases = {"aliases": {1: 0}} if alias else {}

    def row(x):
        call = {"grid": (4,), "N": x.size, "TILE": TILE}
        return launch(small_kernels.added, [x, x * 2], [like(x)], **aliases, **call)[0]

    rows = jax.jit(lambda x: jax.lax.map(row, x))
    with compiling_for(80):
        text = rows.trace(jnp.stack([x, x])).lower(lowering_platforms=("cuda",)).as_text()
    assert ("optimization_barrier" in text) == alias


@pytest.mark.parametrize(
    ("mask", "bits"),
    [
        (Causal() & Local(100, 0), False),
        (Prefix(300) | Causal(), False),
        (Document(np.arange(4096) // 300) & Causal(), False),
        (Predicate(lambda i, j: (i + j) % 3 != 0), True),
    ],
    ids=["window", "prefix", "documents", "bits"],
)
def test_masks_that_are_intervals_take_no_memory_of_the_square(mask, bits, monkeypatch):
    """The program for a GPU, with gradients, has no array with a bit for each pair of a query and a key."""
    length = 4096
    monkeypatch.setattr(compiled, "compile_kernel", lambda call, *_: disk_cache.Compiled(call.name, "", 4, 0, 0))

    def loss(q, k, v):
        return ring_attention(q, k, v, mask_builder=lambda *_: mask, backend="triton").sum()

    x = jax.ShapeDtypeStruct((1, length, 1, 64), jnp.bfloat16)
    with compiling_for(90):
        program = jax.jit(jax.grad(loss, (0, 1, 2))).trace(x, x, x).lower(lowering_platforms=("cuda",))
    sizes = re.findall(r"tensor<((?:\d+x)+)[a-z]", program.as_text())
    largest = max(math.prod(int(size) for size in found.split("x")[:-1]) for found in sizes)
    assert (largest >= length**2 / 32) == bits, f"the largest array has {largest} elements"


def test_what_is_compiled_for_a_gpu_is_not_interpreted():
    assert interpreting() and capability() is None
    with compiling_for(90):
        assert not interpreting() and capability() == 90
        with compiling_for(120):
            assert capability() == 120
    assert interpreting()


def _compiled(x: jax.Array, target: GPUTarget) -> Any:
    ((call, operands),) = launches(jax.make_jaxpr(added)(x, x).jaxpr)
    return compile_kernel.__wrapped__(call, tuple(x.dtype.name for x in (*operands, *call.outputs)), target)


@pytest.mark.parametrize("architecture", ["gfx942", "gfx950"])
def test_a_kernel_compiles_for_an_amd_gpu_that_is_not_there(x, architecture):
    made = _compiled(x, GPUTarget("hip", architecture, 64))
    assert made.name == "added" and made.code[:4] == b"\x7fELF" and made.warps == 4


@pytest.mark.parametrize("target", [GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)], ids=["cuda", "hip"])
def test_a_kernel_is_compiled_once_for_all_processes(x, target, tmp_path, monkeypatch):
    """Another source of this package, or a file that cannot be read, compiles it again."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    runs = []
    monkeypatch.setattr(compiled, "_by_stages", lambda *asked, real=compiled._by_stages: runs.append(1) or real(*asked))
    made = _compiled(x, target)
    assert _compiled(x, target) == made and len(runs) == 1
    (file,) = tmp_path.rglob("*.json")
    file.write_text(file.read_text()[:-9])
    assert _compiled(x, target) == made and len(runs) == 2
    monkeypatch.setattr(disk_cache, "_sources", lambda: "other sources")
    assert _compiled(x, target) == made and len(runs) == 3
    assert _compiled(x, target) == made and len(runs) == 3


def test_a_kernel_compiles_without_a_disk(x, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "folder"))
    assert _compiled(x, GPUTarget("cuda", 90, 32)).name == "added"
