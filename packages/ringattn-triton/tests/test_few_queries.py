# SPDX-License-Identifier: Apache-2.0
"""Promises on the kernel for few queries: which blocks it takes, and that its results are those of the XLA backend."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ringattn_xla.block
import triton.language as tl
from ringattn_core import decode_attention
from ringattn_core.contract.protocol import Block, Partial
from ringattn_testing.triton.compile_reports import launches, of_lowered
from ringattn_testing.triton.given_blocks import (
    SLOPES,
    TOLERANCE,
    dense_mask,
    half_bias,
    ids,
    make_block,
    near,
    spreads_nan,
)
from ringattn_triton.block_kernel import KERNEL, _forward
from ringattn_triton.few_queries import family, forward_kernel
from ringattn_triton.launch import compiling_for
from ringattn_triton.launch.target import Target, target

KERNELS = ["ringattn_few_queries", "ringattn_few_queries_merge"]
HEADS: dict[str, Any] = {"heads": 4, "kv_heads": 2}


def positions(*rows: list[int]) -> np.ndarray:
    return np.array(rows, np.int32)


BLOCKS: dict[str, Any] = {
    "every key": lambda: make_block(2, 1, 300, **HEADS),
    "keys of the past": lambda: make_block(2, 1, 300, causal=True, q_positions=positions([299], [150]), **HEADS),
    "a window": lambda: make_block(
        2, 3, 300, causal=True, sliding_window=(70, 0), q_positions=positions([270, 271, 272], [-1, 0, 1]), **HEADS
    ),
    "keys on both sides": lambda: make_block(1, 2, 600, sliding_window=(40, 90), q_positions=positions([200, 310])),
    "chunks": lambda: make_block(
        2, 2, 320, causal=True, chunk_size=100, q_positions=positions([270, 271], [99, 100]), dtype=jnp.bfloat16
    ),
    "ALiBi and a soft cap": lambda: make_block(
        2, 2, 300, causal=True, slopes=SLOPES, logits_soft_cap=1.5, q_positions=positions([270, 271], [-1, 9]), **HEADS
    ),
    "keys in any order": lambda: make_block(
        2, 1, 300, causal=True, monotone=False, q_positions=positions([99], [49]),
        kv_positions=np.random.default_rng(0).permutation(300)[None].astype(np.int32), **HEADS
    ),
    "ranges of each head": lambda: make_block(
        2, 2, 300, kv_range=tuple(
            np.sort(np.random.default_rng(0).integers(-9, 320, (2, 2, 4, 2)).astype(np.int32), 0)[n] for n in range(2)
        ), **HEADS
    ),
    "padding": lambda: make_block(
        2, 1, 300, causal=True, padded=True, kv_index=np.where(np.arange(300) < 280, np.arange(300), -1)[None],
        q_positions=positions([290], [100]), **HEADS
    ),
    "more than one tile of queries": lambda: make_block(1, 20, 300, heads=6, kv_heads=2, dim=24, dtype=jnp.float32),
}  # fmt: skip


def launched(block: Block, partial: Partial | None = None) -> list[str]:
    program = jax.make_jaxpr(functools.partial(_forward.__wrapped__, target=target()))(block, partial)
    return [call.name for call, _ in launches(program.jaxpr)]


def check(block: Block, case: str, partial: Partial | None = None) -> Partial:
    """The result, if it is that of the XLA backend."""
    got, want = KERNEL.forward(block, partial), ringattn_xla.block.KERNEL.forward(block, partial)
    near(f"{case}: out", got.out, want.out, TOLERANCE[str(block.q.dtype)])
    near(f"{case}: lse", got.lse, want.lse, TOLERANCE[str(block.q.dtype)])
    return got


@pytest.mark.parametrize("case", BLOCKS)
def test_programs_share_the_keys_of_a_head_and_merge_what_they_computed(case: str) -> None:
    block = BLOCKS[case]()
    assert launched(block) == KERNELS
    found = check(block, case)
    check(block, f"{case}, continued", found)


@pytest.mark.parametrize("case", ["a window", "chunks"])
def test_the_first_part_begins_from_sinks(case: str) -> None:
    block = BLOCKS[case]()
    batch, length, heads, _ = block.q.shape
    sinks = Partial(None, jnp.broadcast_to(jnp.linspace(-1.0, 3.0, heads)[None, :, None], (batch, heads, length)))
    assert launched(block, sinks) == KERNELS
    check(block, case, sinks)


def test_nan_of_sinks_reaches_rows_that_see_no_key() -> None:
    spreads_nan(KERNEL.forward, BLOCKS["a window"]())


@pytest.mark.parametrize("case", ["keys of the past", "a window", "keys on both sides"])
def test_the_tiles_that_queries_see_are_found_among_samples(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward_kernel, "SAMPLES", tl.constexpr(4))
    block = BLOCKS[case]()
    found = jax.jit(lambda block: family.forward(block, None, target()))(block)
    want = ringattn_xla.block.KERNEL.forward(block, None)
    near(f"{case}: out", found.out, want.out, TOLERANCE["float32"])


def test_a_program_that_has_all_keys_of_a_head_writes_the_result_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(family, "MULTIPROCESSORS", 1)
    block = dataclasses.replace(BLOCKS["chunks"](), final=True)
    assert launched(block) == KERNELS[:1]
    got = jax.jit(lambda block: family.forward(block, None, target()))(block)
    assert got.out is not None and got.out.dtype == jnp.bfloat16
    near("out", got.out, ringattn_xla.block.KERNEL.forward(block, None).out, TOLERANCE["bfloat16"])


@pytest.mark.parametrize(
    "fields",
    [
        {"q_segments": ids(2, 1), "kv_segments": ids(2, 300)},
        {"bias": half_bias(2, 4, 1, 300)},
        {"mask": dense_mask(2, 1, 1, 300)},
    ],
    ids=str,
)
def test_other_options_run_in_the_portable_kernel(fields: dict[str, Any]) -> None:
    block = make_block(2, 1, 300, heads=4, kv_heads=4, **fields)
    assert launched(block)[-1] == "ringattn_forward"
    assert launched(make_block(1, 40, 300, **HEADS))[-1] == "ringattn_forward"  # 80 rows
    assert launched(make_block(1, 1, 100, **HEADS))[-1] == "ringattn_forward"


@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_on_hopper_it_spills_nothing_and_fits(queries: int, dim: int) -> None:
    q, kv = (jax.ShapeDtypeStruct((2, *sizes, dim), jnp.bfloat16) for sizes in ((queries, 32), (4096, 2)))
    with compiling_for(90):
        step = functools.partial(decode_attention, lengths=4096, backend="triton")
        found = of_lowered(jax.jit(step).trace(q, kv, kv).lower(lowering_platforms=("cuda",)))
    assert [report.name for report in found] == KERNELS
    limit = Target("cuda", 90).shared_memory
    for report in found:
        assert report.spilled == 0 and limit is not None and report.shared <= limit, report
