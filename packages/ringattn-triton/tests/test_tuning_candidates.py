# SPDX-License-Identifier: Apache-2.0
"""Promises of the candidates: each is a schedule that the kernels take as it is, and most fit the device."""

from typing import Any

import jax.numpy as jnp
import pytest
from given_blocks import make_block
from ringattn_core.config import BwdParams, FwdParams
from ringattn_core.errors import InputError
from ringattn_core.tuning import Problem
from ringattn_triton import kernel_inputs
from ringattn_triton.launch.target import Target
from ringattn_triton.portable import schedules
from ringattn_triton.portable.schedules import Schedule
from ringattn_triton.tuning_candidates import candidate_configs

HOPPER = Target("cuda", 90)


def problem(dtype: str = "bfloat16", length: int = 4096, platform: str = "cuda") -> Problem:
    return Problem(
        backend="triton", batch=1, q_length=length, kv_length=length, heads=2, kv_heads=2, head_dim=128, value_dim=128,
        dtype=dtype, platform=platform, device="NVIDIA H200", versions=(),
    )  # fmt: skip


def facts_and_size(dtype: str) -> tuple[Any, int]:
    block = make_block(batch=1, q_length=512, kv_length=512, dim=128, dtype=jnp.dtype(dtype))
    return kernel_inputs.of_block(block, fast=True).constants, jnp.dtype(dtype).itemsize


def asked(params: FwdParams | BwdParams, prefix: str = "") -> tuple[int, ...]:
    given = {**params.to_dict(), **dict(params.extra)}
    names = ("q_blocksize", "kv_blocksize", "num_warps", "num_stages")
    return tuple(given[prefix + name] for name in names)


def sizes(schedule: Schedule) -> tuple[int, ...]:
    """What a caller can ask for."""
    return schedule.q_tile, schedule.kv_tile, schedule.warps, schedule.stages


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_each_is_a_schedule_of_its_own_that_runs_as_it_says(dtype: str) -> None:
    facts, itemsize = facts_and_size(dtype)
    configs = candidate_configs(problem(dtype))
    forward = [c.fwd_params for c in configs if c.fwd_params != FwdParams()]
    backward = [c.bwd_params for c in configs if c.bwd_params != BwdParams()]
    assert len(set(forward)) == len(forward) >= 8
    assert len(set(backward)) == len(backward) >= 16
    fitting = 0
    for params in forward:
        try:
            assert sizes(schedules.forward(facts, itemsize, params, HOPPER)) == asked(params)
            fitting += 1
        except InputError as error:
            assert "shared memory" in str(error)
    for params in backward:
        assert sizes(schedules.backward_keys(facts, itemsize, params, HOPPER)) == asked(params)
        assert sizes(schedules.backward_queries(facts, itemsize, params, HOPPER)) == asked(params, "dq_")
    assert fitting >= len(forward) - 2


def test_no_tile_is_longer_than_the_block() -> None:
    configs = candidate_configs(problem(length=40))
    assert configs
    for config in configs:
        for params in (config.fwd_params, config.bwd_params):
            assert max(params.q_blocksize or 0, params.kv_blocksize or 0) <= 64


def test_an_interpreter_has_none() -> None:
    assert candidate_configs(problem(platform="cpu")) == []
