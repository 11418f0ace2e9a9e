# SPDX-License-Identifier: Apache-2.0
"""Each candidate for tuning is a schedule that the kernels take as it is, or one that is too large for the device."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import pytest
from ringattn_core.config import BwdParams, FwdParams
from ringattn_core.errors import InputError
from ringattn_core.tuning import Problem
from ringattn_testing.triton.given_blocks import make_block
from ringattn_triton import kernel_inputs
from ringattn_triton.launch.target import Target
from ringattn_triton.portable import schedules
from ringattn_triton.tuning_candidates import candidate_configs


def problem(dtype: str = "bfloat16", length: int = 4096, platform: str = "cuda") -> Problem:
    return Problem(
        backend="triton", batch=1, q_length=length, kv_length=length, heads=2, kv_heads=2, head_dim=128, value_dim=128,
        dtype=dtype, platform=platform, device="NVIDIA H200", versions=(),
    )  # fmt: skip


def asked(params: Any, prefix: str = "") -> tuple[int, ...]:
    given = {**params.to_dict(), **dict(params.extra)}
    return tuple(given[prefix + name] for name in ("q_blocksize", "kv_blocksize", "num_warps", "num_stages"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_each_runs_as_it_says_or_needs_too_much_shared_memory(dtype: str) -> None:
    block = make_block(batch=1, q_length=512, kv_length=512, dim=128, dtype=jnp.dtype(dtype))
    facts = kernel_inputs.of_block(block, fast=True).constants

    def taken(schedule: Any, params: Any) -> tuple[int, ...] | None:
        sizes = "fwd_params" if isinstance(params, FwdParams) else "bwd_params"
        asking = dataclasses.replace(block, rule=dataclasses.replace(block.rule, **{sizes: params}))
        try:
            found = schedule(asking, facts, Target("cuda", 90))
        except InputError as error:
            assert "shared memory" in str(error)
            return None
        return found.q_tile, found.kv_tile, found.warps, found.stages

    configs, too_large = candidate_configs(problem(dtype=dtype)), 0
    forward = {config.fwd_params for config in configs} - {FwdParams()}
    backward = {config.bwd_params for config in configs} - {BwdParams()}
    assert len(forward) >= 8 and len(backward) >= 16
    for params in forward:
        found = taken(schedules.forward, params)
        too_large += found is None
        assert found in (None, asked(params))
    assert too_large <= 2
    for params in backward:
        assert taken(schedules.backward_keys, params) == asked(params)
        assert taken(schedules.backward_queries, params) == asked(params, "dq_")


def test_no_tile_is_longer_than_the_block() -> None:
    configs = candidate_configs(problem(length=40))
    given = [params for config in configs for params in (config.fwd_params, config.bwd_params)]
    assert configs and max(size or 0 for x in given for size in (x.q_blocksize, x.kv_blocksize)) <= 64


def test_an_interpreter_has_none() -> None:
    assert candidate_configs(problem(platform="cpu")) == []
