# SPDX-License-Identifier: Apache-2.0
"""Promises of a trial: kernels get the blocks of the last rank as the ring engine would give them, and send nothing."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from ringattn_core.backends import discovery
from ringattn_core.call.validation import validated
from ringattn_core.config import BwdParams, FwdParams
from ringattn_core.contract.merge import empty
from ringattn_core.contract.protocol import Gradients
from ringattn_core.masks import Causal, Prefix
from ringattn_core.ring import engine
from ringattn_core.tuning.problem import Problem, of_call
from ringattn_tools import trial

T, S, N, K, H = 16, 16, 4, 2, 8
Q = jnp.ones((2, T, N, H))
KV = jnp.ones((2, S, K, H))
IDS = jnp.zeros((2, T), jnp.int32)
CALLS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "layout": {"layout": "zigzag", "causal": True, "ranks": 4},
    "window": {"sliding_window": (4, 3), "ranks": 4},
    "segments": {"q_segment_ids": IDS},
    "offset": {"query_offset": 3},
    "bias of heads": {"bias": jnp.zeros((1, N, T, 3 * S)), "ranks": 3, "alibi_slopes": jnp.ones(N)},
    "mask": {"mask_builder": lambda *_: Prefix(3) | Causal()},
    "sinks": {"softmax_aux": jnp.ones(N), "return_lse": True},
}


def call_of(ranks: int = 1, q: Any = Q, k: Any = KV, **options: Any) -> Any:
    return validated(q, k, k, **options, ranks=ranks)


def of(ranks: int = 1, **options: Any) -> Problem:
    return of_call(discovery.get("xla"), call_of(ranks, **options), ranks)


class Seen:
    """A kernel that computes nothing, and records the blocks and parameters that it was given."""

    def __init__(self) -> None:
        self.blocks: list[Any] = []
        self.params: list[Any] = []
        self.positions: list[Any] = []

    def forward(self, block: Any, partial: Any) -> Any:
        shapes = {
            field.name: jax.tree.map(lambda x: (x.shape, x.dtype), getattr(block, field.name))
            for field in dataclasses.fields(block)
            if not field.metadata.get("static")
        }
        self.blocks.append((shapes, block.rule, block.reach))
        self.params.append(block.rule.fwd_params)
        jax.debug.callback(lambda *x: self.positions.append(x), block.q_positions, block.kv_positions, ordered=True)
        partial = empty(block) if partial is None or partial.out is None else partial
        return dataclasses.replace(partial, out=partial.out + 0.0, lse=partial.lse + 1.0)

    def backward(self, block: Any, dout: Any, lse: Any, delta: Any, dq: Any) -> Any:
        self.params.append(block.rule.bwd_params)
        bias, slopes = (None if x is None else jnp.zeros(x.shape) for x in (block.bias, block.slopes))
        dq = jnp.zeros(block.q.shape) if dq is None else dq
        return Gradients(dq, jnp.zeros(block.k.shape), jnp.zeros(block.v.shape), bias, slopes)


def made(problem: Problem, kernel: Any = None) -> trial.Trial:
    return trial.trial(kernel or Seen(), problem, jax.devices()[0])


def run(kernel: Any, problem: Problem, forward: FwdParams = FwdParams(), backward: BwdParams = BwdParams()) -> None:
    of_problem = made(problem, kernel)
    of_problem.backward(backward, of_problem.forward(forward)())()
    jax.effects_barrier()


@pytest.mark.parametrize("name", CALLS)
def test_the_kernel_sees_the_block_that_the_engine_would_give_it(name: str) -> None:
    call, ranks, real, timed = call_of(**CALLS[name]), CALLS[name].get("ranks", 1), Seen(), Seen()

    def on_one_rank(_: Any) -> Any:
        return engine.run(real, call.placed(axis_name=("ring",) if ranks > 1 else None))

    jax.eval_shape(lambda: jax.vmap(on_one_rank, axis_name="ring")(jnp.arange(ranks)))
    run(timed, of(**CALLS[name]))
    assert timed.blocks[0] == real.blocks[0]


def test_it_has_as_many_hops_as_the_ring_up_to_a_few() -> None:
    hops = {ranks: len(made(of(ranks=ranks)).blocks) for ranks in (1, 2, 3, 64)}
    assert hops == {1: 1, 2: 2, 3: 3, 64: trial.HOPS}
    assert len(made(of(ranks=64, sliding_window=(3, 0))).blocks) == 2


def test_its_rank_has_work_at_every_hop() -> None:
    kernel = Seen()
    run(kernel, of(ranks=4, causal=True))
    assert len(kernel.positions) == 4
    assert all(q.min() >= kv.max() for q, kv in kernel.positions[1:])
