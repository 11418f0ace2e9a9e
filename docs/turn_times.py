# SPDX-License-Identifier: Apache-2.0
# pyright: basic, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportIndexIssue=false
# pyright: reportCallIssue=false
"""When programs take the turns of the one-pass backward kernel, and when each turn adds to dq: a small simulation.

The kernel's own functions, interpreted, say which turn is taken next, which query tiles it visits and with which ranks.
Only the times are simulated.
"""

import collections
import dataclasses
import os
from collections.abc import Sequence
from typing import Final, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from ringattn_core.contract.tiles import Tiles
from ringattn_triton import visited_tiles
from ringattn_triton.hopper.backward_turns import Turns, rank_of, steps_of, take_turn, tile_at
from ringattn_triton.hopper.plans import BackwardPlan
from ringattn_triton.kernels.tile_loop import owned
from ringattn_triton.launch import launch
from ringattn_triton.launch.target import INTERPRETER
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ADDITION: Final = 1.5
"""How many steps after a turn has begun to add to a tile of dq the next turn may begin to."""


class Step(NamedTuple):
    """A query tile that a turn visits. It begins to add to its dq at time `added`, after `rank` other turns.

    The step takes the time from `begun` to `ended`: 1, and more where the addition of the step before begins later.
    """

    tile: int
    rank: int
    begun: float
    ended: float
    added: float


class Turn(NamedTuple):
    """A key tile of a head, the program that takes it, its steps, and the times at which it begins and ends."""

    head: int
    key_tile: int
    program: int
    steps: tuple[Step, ...]
    begun: float
    ended: float


def causal_turns(plan: BackwardPlan, key_tiles: int, heads: int, programs: int) -> list[Turn]:
    """The turns of `heads` heads, one head after another, under a causal mask, in the order in which they are taken."""
    free = [0.0] * programs
    count: collections.Counter[tuple[int, int]] = collections.Counter()
    reached: dict[tuple[int, int], float] = {}
    turns = []
    for head, key_tile, visits in _visits(plan, key_tiles, heads):
        program = free.index(min(free))
        ended = added = free[program]
        steps = []
        for tile, rank in visits:
            at = head, tile
            assert count[at] == rank, "a turn would wait for one that is taken after it"
            # dq of a step has no place before dq of the step before is being added.
            begun, ended = ended, max(ended + 1, added)
            added = max(ended, reached.get(at, 0.0))
            steps.append(Step(tile, rank, begun, ended, added))
            count[at] += 1
            reached[at] = added + ADDITION
        free[program] = added
        turns.append(Turn(head, key_tile, program, tuple(steps), steps[0].begun, added))
    return turns


def _visits(plan: BackwardPlan, key_tiles: int, heads: int) -> list[tuple[int, int, Sequence[tuple[int, int]]]]:
    """Each turn in the order in which turns are taken: its head, its key tile, and its query tiles with their ranks."""
    q_tiles = key_tiles * plan.kv_tile // plan.q_tile
    first_query, first_key = np.arange(q_tiles)[:, None] * plan.q_tile, np.arange(key_tiles) * plan.kv_tile
    some, full = first_key < first_query + plan.q_tile, first_key + plan.kv_tile <= first_query + 1
    with mock.patch.dict(os.environ, {INTERPRETER.variable: "1"}):
        table = visited_tiles.of_bitmap(
            Tiles(jnp.array(some[None, None]), jnp.array(full[None, None])), listed=False, run=True, by_keys=True,
            ragged=False, ranked=True,
        )  # fmt: skip
        _, found = launch(
            list_visits,
            [table.bounds, table.ranks, table.counters],
            [
                jax.ShapeDtypeStruct((1,), jnp.int32),
                jax.ShapeDtypeStruct((key_tiles * heads, q_tiles, 4), jnp.int32),
            ],
            grid=(1,),
            aliases={2: 0},
            name="list_visits",
            COUNT=key_tiles * heads,
            T=table.shape,
            PLAN=dataclasses.replace(plan, ordered=True),
        )
        turns = np.asarray(found).tolist()
    return [(turn[0][0], turn[0][1], [(tile, rank) for _, _, tile, rank in turn if rank >= 0]) for turn in turns]


@gluon.jit
def list_visits(
    BOUNDS, RANKS, COUNTERS_BEFORE, COUNTERS, VISITS, COUNT: gl.constexpr, T: gl.constexpr, PLAN: gl.constexpr
):
    """Takes all turns. Writes head, key tile, query tile and rank of each step; past the last step the rank is -1."""
    turns = Turns(BOUNDS, BOUNDS, RANKS, COUNTERS, COUNT, 0)
    for number in range(COUNT):
        turn = take_turn(turns, T, PLAN)
        key_tile, head, _ = owned(turn, T, 1)
        steps = steps_of(turn, (key_tile, 0, 0), turns, T, PLAN)
        for step in range(T.columns):
            at = VISITS + (number * T.columns + step) * 4
            gl.store(at, head)
            gl.store(at + 1, key_tile)
            if step < steps.masked_before + steps.whole + steps.masked_after:
                tile = tile_at(steps, step, T, PLAN)
                gl.store(at + 2, tile)
                gl.store(at + 3, rank_of(tile, turn, (key_tile, 0, 0), turns, T, PLAN))
            else:
                gl.store(at + 2, -1)
                gl.store(at + 3, -1)
