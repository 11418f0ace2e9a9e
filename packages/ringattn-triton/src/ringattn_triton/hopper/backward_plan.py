# SPDX-License-Identifier: Apache-2.0
"""How large the tiles of the one-pass backward kernel are, and how many places each array has in shared memory."""

import dataclasses
from typing import Final

from ..kernel_inputs import BlockConstants, power_of_two
from .head_tiles import padded_size


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """The tile sizes, places and registers of the one-pass backward kernel, and how it divides the work.

    `wide`: one consumer computes dv and the other dk, each of all keys (`wide_products`). Otherwise each consumer
    computes both, for half of the keys. `masked`: some tiles may need a mask. `ordered`: turns add to dq in the order
    in which they are taken, so that every run gives the same bits. `heads_inside`: a turn visits a query tile for all
    heads of its group before the next tile, not all tiles for a head first. `upwards`: all but the heads that run last
    take the turns of their last keys first (`backward_turns.steps_of`). `interleaved`: short turns of some heads are
    taken between the long turns of the next heads. `abreast`: how many neighbouring key tiles of a head begin together.
    (`backward_turns.take_turn` explains both.) `of_queries`: which numbers a step reads of each query besides lse and
    delta, as options and masks need them: "distance" from the first query of the tile, "position", "segment".
    `subtracting`: the tensor cores subtract lse and delta (`backward_products.subtracted`).
    `strip_rows`: a launch computes so many key tiles and stores their ds; 0: it computes all key tiles and stores no
    ds.
    """

    q_tile: int
    wide: bool = False
    masked: bool = False
    ordered: bool = False
    heads_inside: bool = False
    upwards: bool = False
    interleaved: bool = False
    abreast: int = 1
    of_queries: tuple[str, ...] = ()
    subtracting: bool = False
    strip_rows: int = 0
    kv_tile: int = 128
    stages: int = 2
    dout_stages: int = 2
    ds_places: int = 2
    dq_places: int = 2
    """How many places for pieces of dq there are in shared memory; a piece is 64 queries by 64 dimensions."""
    registers: int = 240
    """Registers of a consumer's thread while the program runs: more than at the start, because the other warps release
    theirs."""

    @property
    def barriers(self) -> int:
        """The length of the array `BackwardMemory.barriers`, rounded up to a power of two as Triton requires."""
        return power_of_two(5 + self.dout_stages)

    @property
    def dout_first(self) -> int:
        """The number of the first place of dout in its allocation. Unless `wide`, that is the queries' allocation."""
        return 0 if self.wide else self.stages

    @property
    def v_first(self) -> int:
        """The number of the place of values in its allocation. Unless `wide`, that is the allocation of the keys."""
        return 0 if self.wide else 1

    def pieces(self, dim: int) -> int:
        """In how many pieces of 64 queries by 64 dimensions a tile of dq is added to memory; `dim` is the head size."""
        return self.q_tile // 64 * -(-dim // 64)


PLANS: Final = {
    64: BackwardPlan(q_tile=128),
    128: BackwardPlan(q_tile=64),
    192: BackwardPlan(q_tile=64, wide=True, kv_tile=64, dout_stages=2, ds_places=1, dq_places=3),
    256: BackwardPlan(q_tile=64, wide=True, kv_tile=64, dout_stages=1, ds_places=1, dq_places=3),
}
"""The plans by head size (`padded_size`). The accumulators of a step allow no larger tiles."""


def plan_of(constants: BlockConstants) -> BackwardPlan | None:
    """The plan for the head sizes in `constants`, or `None` if the one-pass kernel does not take these sizes."""
    dim, value_dim = constants.head_dim, constants.value_dim
    plan = PLANS.get(int(padded_size(max(dim, value_dim) if dim > 128 else dim)))
    if plan is None or dim < 64 or dim % 8 or value_dim % 8:
        return None
    if plan.wide and constants.padded_value_dim == 128:
        return dataclasses.replace(plan, dout_stages=2)  # smaller values leave room for a second place
    return plan if constants.padded_value_dim == constants.padded_head_dim else None
