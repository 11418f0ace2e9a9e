# SPDX-License-Identifier: Apache-2.0
"""Builds the programs that tuning times: the kernel on the hops of one rank, forward and backward, on random arrays."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp

from ..config import BwdParams, FwdParams
from ..contract.call import Call
from ..contract.checks import backward, forward
from ..contract.packing import pack
from ..contract.protocol import Block, BlockKernel, Partial
from ..errors import TuningError
from ..placement.arrays import letters_of
from ..placement.layout import indices
from ..ring import engine
from ..ring.backward import Rows
from ..ring.blocks import block
from ..ring.directions import Direction, Location, parts, split
from ..ring.forward import Residuals
from .problem import UNSEEN, Problem

HOPS: Final = 4
"""The most hops of a trial. The first has the rank's own keys; the later ones hardly differ from each other."""
DOCUMENTS: Final = 4
"""If the call has segment ids, a trial has this number of equally long documents in a shard."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """The blocks of one rank on one device, and the programs that run them through the kernel.

    It is the last rank, which has the most work under a causal mask. Nothing is sent. Each hop is a call of one
    compiled program, so that XLA cannot merge hops; the partial result is donated from hop to hop.
    """

    kernel: BlockKernel
    direction: Direction
    blocks: tuple[Block, ...]
    dout: jax.Array

    def forward(self, params: FwdParams) -> Callable[[], Partial]:
        """Makes a function that runs the forward pass over all hops with these parameters, for the tuner to time."""
        blocks = [_with(each, fwd_params=params) for each in self.blocks]

        def run() -> Any:
            partial = None
            for each in blocks:
                partial = _forward_hop(self.kernel, each, partial)
            return partial

        return run

    def backward(self, params: BwdParams, whole: Partial) -> Callable[[], Any]:
        """Makes a function that runs the backward pass over all hops, for the tuner; `whole` is the forward result."""
        rows = _rows(self.kernel, self.direction.call, self.direction.location, whole, self.dout)
        blocks = [_with(each, bwd_params=params) for each in self.blocks]

        def run() -> Any:
            dq, found = None, []
            for each in blocks:
                dq, others = _backward_hop(self.kernel, each, rows, dq)
                found.append(others)
            return dq, found

        return run


def trial(kernel: BlockKernel, problem: Problem, device: jax.Device) -> Trial:
    """Makes the trial of `problem` on `device`. Equal problems get equal inputs."""
    with jax.default_device(device):
        call = _inputs(problem)
        ring, location = engine.prepared(kernel, call, (problem.ranks - 1, problem.ranks))
        signs = ring.plan.signs
        direction = split(signs, call, location)[0]
        kv = direction.call.key, direction.call.value
        kv = kv if problem.ranks == 1 else pack(*kv)
        blocks = [block(ring, direction, kv, offset) for offset in ring.plan.offsets[:HOPS]]
        dout = jax.random.normal(jax.random.key(1), (*call.query.shape[:3], problem.value_dim), call.query.dtype)
        made = Trial(
            kernel,
            direction,
            tuple(dataclasses.replace(each, final=problem.ranks == 1) for each in blocks),
            parts(dout, 2, len(signs))[0],
        )
    jax.block_until_ready((made.blocks, made.dout))
    return made


def _inputs(problem: Problem) -> Call:
    """The call of `problem` with made-up arrays; the ids and positions of keys are those of all ranks."""
    call = problem.call
    if call is None:
        raise TuningError(
            problem.backend,
            "its problem was not made from a call",
            "Tune a problem that core made, or run ringattn tune",
        )
    call = dataclasses.replace(call, **dict.fromkeys(UNSEEN))
    keys = jax.random.split(jax.random.key(0), len(call.arrays))
    made = {name: _array(name, x, problem, key) for (name, x), key in zip(call.arrays.items(), keys, strict=True)}
    return dataclasses.replace(call, **made)


def _array(name: str, x: Any, problem: Problem, key: jax.Array) -> jax.Array:
    """Makes one array. Floats are random, a dense mask hides nothing, and an offset is 0.

    Positions are those of the layout, and segment ids those of packed documents.
    """
    if not jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.ones(x.shape, bool) if x.dtype == jnp.bool_ else jax.random.normal(key, x.shape, x.dtype)
    if not x.shape or name == "query_offset":
        return jnp.zeros(x.shape, x.dtype)
    of_keys = letters_of(Call)[name][-1] == "S"
    ranks = range(problem.ranks) if of_keys else [problem.ranks - 1]
    call: Any = problem.call
    tokens = jnp.concatenate([indices(call.layout, problem.ranks, rank, x.shape[-1]) for rank in ranks])
    document = max(problem.kv_length // DOCUMENTS, 1) if name.endswith("segment_ids") else 1
    return jnp.broadcast_to(tokens // document, (*x.shape[:-1], tokens.size))


def _with(block: Block, **params: Any) -> Block:
    return dataclasses.replace(block, rule=dataclasses.replace(block.rule, **params))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _forward_hop(kernel: BlockKernel, visited: Block, partial: Partial | None) -> Partial:
    return forward(kernel, visited, partial)


@functools.partial(jax.jit, static_argnums=0)
def _rows(kernel: BlockKernel, call: Call, location: Location, whole: Partial, dout: jax.Array) -> Rows:
    kept = Residuals(call, location, whole.out, whole.lse)
    return Rows.of(kernel, kept, dout, jnp.zeros_like(whole.lse))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _backward_hop(kernel: BlockKernel, visited: Block, rows: Rows, dq: jax.Array | None) -> tuple[jax.Array, Any]:
    found = backward(kernel, visited, rows.dout, rows.lse, rows.delta, dq)
    return found.dq, {name: x for name, x in vars(found).items() if name != "dq"}


def release() -> None:
    """Frees the compiled programs of all trials."""
    programs: tuple[Any, ...] = (_forward_hop, _rows, _backward_hop)
    for program in programs:
        program.clear_cache()
