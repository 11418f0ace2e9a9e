# SPDX-License-Identifier: Apache-2.0
"""Builds the programs that tuning times: the kernel on the hops of one rank, forward and backward, on random arrays."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
from ringattn_core.config import BwdParams, FwdParams
from ringattn_core.contract.call import Call
from ringattn_core.contract.checks import backward, forward
from ringattn_core.contract.protocol import Block, BlockKernel, Partial
from ringattn_core.errors import TuningError
from ringattn_core.placement.arrays import letters_of
from ringattn_core.placement.layout import Shards
from ringattn_core.tuning.problem import Problem

from .engine import blocks_of_last_rank

HOPS: Final = 4
"""The most hops of a trial. The first has the rank's own keys; the later ones hardly differ from each other."""
DOCUMENTS: Final = 4
"""If the call has segment ids, a trial has this number of equally long documents in a shard."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """The blocks of one rank on one device, and the programs that run them through the kernel.

    The rank is the last, which has the most work under a causal mask. Nothing is sent. Each hop is a call of one
    compiled program, so that XLA cannot merge hops; the partial result is donated from hop to hop.
    """

    kernel: BlockKernel
    blocks: tuple[Block, ...]
    dout: jax.Array

    def forward(self, params: FwdParams) -> Callable[[], Partial]:
        """Makes a function that runs the forward pass over all hops with these parameters, for the tuner to time."""
        blocks = [_with(block, fwd_params=params) for block in self.blocks]

        def run() -> Any:
            partial = None
            for block in blocks:
                partial = _forward_hop(self.kernel, block, partial)
            return partial

        return run

    def backward(self, params: BwdParams, whole: Partial) -> Callable[[], Any]:
        """Makes a function that runs the backward pass over all hops, for the tuner. `whole`: the forward result."""
        blocks = [_with(block, bwd_params=params) for block in self.blocks]
        assert whole.out is not None
        products = self.dout.astype(jnp.float32) * whole.out.astype(jnp.float32)
        rows = self.dout, whole.lse, jnp.swapaxes(products.sum(-1), 1, 2)

        def run() -> Any:
            dq, others = None, []
            for block in blocks:
                dq, of_block = _backward_hop(self.kernel, block, rows, dq)
                others.append(of_block)
            return dq, others

        return run


def trial(kernel: BlockKernel, problem: Problem, device: jax.Device) -> Trial:
    """Makes the trial of `problem` on `device`. Equal problems get equal inputs."""
    with jax.default_device(device):
        call = _inputs(problem)
        blocks = blocks_of_last_rank(kernel, call, problem.ranks, HOPS)
        dout = jax.random.normal(jax.random.key(1), (*call.query.shape[:3], problem.value_dim), call.query.dtype)
    jax.block_until_ready((blocks, dout))
    return Trial(kernel, blocks, dout)


def _inputs(problem: Problem) -> Call:
    """The call of one rank that `problem` describes, with made-up arrays, and key ids and positions of all ranks."""
    call = problem.call
    if call is None:
        raise TuningError(
            problem.backend,
            "its problem was not made from a call",
            "Tune a problem that core made, or run ringattn tune",
        )
    keys = jax.random.split(jax.random.key(0), len(call.arrays))
    made = {name: _array(name, x, problem, key) for (name, x), key in zip(call.arrays.items(), keys, strict=True)}
    return dataclasses.replace(call, **made)


def _array(name: str, x: Any, problem: Problem, key: jax.Array) -> jax.Array:
    """Makes array `name` with the shape and dtype of `x`. Floats and ids of blocks are random, a dense mask is true.

    An offset and the first keys of ranges are 0, and a range ends at its query. Queries have the last rank's positions
    in the layout, and keys the positions of all ranks. Segment ids number `DOCUMENTS` documents a shard.
    """
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.ones(x.shape, bool) if x.dtype == jnp.bool_ else jax.random.normal(key, x.shape, x.dtype)
    call: Any = problem.call
    if name == "selected":
        blocks = max(problem.kv_length * problem.ranks // (call.selected_size or 1), 1)
        return jax.random.randint(key, x.shape, 0, blocks, x.dtype)
    if not x.shape or name in ("query_offset", "kv_first"):
        return jnp.zeros(x.shape, x.dtype)
    of_keys = letters_of(Call)[name][-1] == "S"
    ranks = range(problem.ranks) if of_keys else [problem.ranks - 1]
    tokens = jnp.concatenate(
        [Shards(call.placement.layout, problem.ranks).indices(rank, x.shape[-1]) for rank in ranks]
    )
    document = max(problem.kv_length // DOCUMENTS, 1) if name.endswith("segment_ids") else 1
    return jnp.broadcast_to(tokens // document, (*x.shape[:-1], tokens.size))


def _with(block: Block, **params: Any) -> Block:
    return dataclasses.replace(block, rule=dataclasses.replace(block.rule, **params))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _forward_hop(kernel: BlockKernel, visited: Block, partial: Partial | None) -> Partial:
    return forward(kernel, visited, partial)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _backward_hop(
    kernel: BlockKernel, visited: Block, rows: tuple[jax.Array, ...], dq: jax.Array | None
) -> tuple[jax.Array, Any]:
    gradients = backward(kernel, visited, *rows, dq)
    return gradients.dq, {name: x for name, x in vars(gradients).items() if name != "dq"}


def release() -> None:
    """Frees the compiled programs of all trials."""
    programs: tuple[Any, ...] = (_forward_hop, _backward_hop)
    for program in programs:
        program.clear_cache()
