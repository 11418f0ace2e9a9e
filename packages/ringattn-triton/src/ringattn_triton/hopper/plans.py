# SPDX-License-Identifier: Apache-2.0
# pyright: standard, reportUndefinedVariable=false, reportInvalidTypeForm=false
"""The plans of the Hopper kernels by head size and options: tiles, places, registers and hardware barriers."""

import dataclasses
from typing import Final

import triton.language as tl

from ..kernel_inputs import BlockConstants
from .head_tiles import padded_size

PROGRAMS: Final = 132
"""The most programs of a launch: one for each multiprocessor of the largest Hopper GPU. On a smaller GPU the last
programs find no work."""
CONSUMER_ROWS: Final = tl.constexpr(64)
"""How many queries a consumer of the forward kernel computes: the rows of a product of one warpgroup."""
_FIRST_FREE: Final = 4
"""The first hardware barrier that Triton leaves free if three partitions have several warps; if two have, it is 3.
Triton takes barriers from 0 on: one for all partitions, and one for each partition of several warps."""


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """Tile size, places and registers of the forward kernel, and how it runs.

    `stages`: places for key tiles. `ordered`: consumers begin their products one after another. `masked`: some tiles
    may need a mask. `fresh`: there is no partial output to continue. `from_lse`: the softmax begins from a log-sum-exp,
    of a partial result or of sinks. `bounded`: half of the soft cap, not the row maximum, is subtracted from scores.
    `results_by_tma`: the producer writes outputs by TMA, from shared memory; otherwise the consumers do, from
    registers. `one_sided`: scores depend on distances, and no query sees a key after itself.
    """

    consumers: int
    kv_tile: int
    stages: int
    ordered: bool
    registers_at_start: int
    """Registers of each thread when a program begins."""
    registers: int
    """Registers of a consumer's thread while the program runs: more than at the start, because the producer releases
    its own."""
    q_places: int = 2
    """Places for query tiles in shared memory. With two, the queries of the next turn are fetched early."""
    masked: bool = False
    fresh: bool = False
    from_lse: bool = False
    bounded: bool = False
    results_by_tma: bool = False
    one_sided: bool = False

    @property
    def q_tile(self) -> int:
        return self.consumers * CONSUMER_ROWS.value

    @property
    def hardware_barriers(self) -> dict[str, tuple[int, int]]:
        """The first barrier of each name, and for how many threads it waits (the module `hardware_barriers`).

        "order", one for each consumer: the consumer may begin its products. "x_empty", one for each place of `x`: all
        consumers have told the producer that they are done with the place. "rest" is the second piece of values. A
        consumer cannot arrive twice before the producer has waited, because it reads a place again only after the
        producer has filled the place again. With three consumers and three stages, the last barrier, 15, is used.
        """
        every = 32 + 128 * self.consumers
        counts = {"order": self.consumers, "k_empty": self.stages, "v_empty": self.stages, "turn_empty": 2}
        # These two come last, because plans with three stages do not use them: with two places of queries "turn_empty"
        # says that a place is empty. Barrier 4 is not used.
        counts |= {"q_empty": 1, "rest_empty": 1}
        return _numbered(_FIRST_FREE + 1, {name: (n, 256 if name == "order" else every) for name, n in counts.items()})


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """The tile sizes, places and registers of the one-pass backward kernel, and how it divides the work.

    What follows from the head size alone (`BACKWARD`). `stages`, `dout_stages`: places of queries and of dout. `wide`:
    one consumer computes dv and the other dk, each of all keys (`backward_wide_products`). Otherwise each consumer
    computes both, for half of the keys.

    What follows from the call, and is set once, by `turn_order.arranged` or `backward.backward`. `ordered`: turns add
    to dq in the order in which they are taken, so that every run gives the same bits. `heads_inside`: a turn visits a
    query tile for all heads of its group before the next tile, not all tiles for a head first. `upwards`
    (`backward_turns.steps_of`): all but the heads that run last take the turns of their last keys first. `interleaved`
    (`backward_turns.take_turn`): short turns of some heads are taken between the long turns of the next. `abreast`: how
    many neighbouring key tiles of a head begin together. `masked`: some tiles may need a mask. `of_queries`: which
    numbers a step reads of each query besides lse and delta: "distance" from the first query of the tile, the "first"
    and "last" position that it sees, "segment". `subtracting`: the tensor cores subtract lse and delta
    (`backward_products.subtract`). `results_by_tma`: dk and dv are written by TMA, from shared memory. `strip_rows`: a
    launch computes so many key tiles and stores their ds; 0: it computes all key tiles and stores no ds.
    """

    q_tile: int
    kv_tile: int = 128
    wide: bool = False
    stages: int = 2
    """Two, as the writers alternate, and steps use places and barriers in turn."""
    dout_stages: int = 2
    """As many as `stages`, unless `wide`."""
    registers: int = 240
    """Registers of a consumer's thread while the program runs: more than at the start, because the other warps release
    theirs."""

    ordered: bool = False
    heads_inside: bool = False
    upwards: bool = False
    interleaved: bool = False
    abreast: int = 1
    masked: bool = False
    of_queries: tuple[str, ...] = ()
    subtracting: bool = False
    results_by_tma: bool = False
    strip_rows: int = 0

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

    @property
    def hardware_barriers(self) -> dict[str, tuple[int, int]]:
        """The first barrier of each name, and for how many threads it waits (the module `hardware_barriers`).

        `backward_kernel` has a table of what each says. "dq_full" has four: at number `2 c + w`, consumer `c` tells
        writer `w`. Number 3, "weights_empty", is free because only two partitions have several warps.
        """
        counts = {"weights_empty": (1, 256), "ds_full": (1, 256), "q_empty": (2, 288), "dout_empty": (2, 288)}
        return _numbered(
            _FIRST_FREE - 1, counts | {"dq_empty": (2, 160), "weights_full": (1, 256), "dq_full": (4, 160)}
        )


def _numbered(first: int, counts: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Numbers barriers from `first` on: `counts` says how many have a name, and for how many threads each waits."""
    found = {}
    for name, (count, threads) in counts.items():
        found[name] = first, threads
        first += count
    return found


_OF_256: Final = ForwardPlan(2, 64, 2, False, 168, 240, 1)
_FORWARD: Final = {
    (64, 64, False): ForwardPlan(3, 128, 2, True, 128, 160),
    (128, 128, False): ForwardPlan(2, 128, 2, True, 168, 240),
    (128, 128, True): ForwardPlan(3, 64, 3, True, 128, 160),
    (192, 128, False): ForwardPlan(2, 128, 2, True, 168, 240, 1),
    (192, 192, False): ForwardPlan(2, 128, 2, True, 168, 240, 1),
    (192, 256, False): _OF_256,
    (256, 128, False): ForwardPlan(2, 64, 3, False, 168, 240, 1),
    (256, 192, False): _OF_256,
    (256, 256, False): _OF_256,
}
"""The plans by head size of keys and of values (`padded_size`), and by whether there is a soft cap."""
_SHORT: Final = ForwardPlan(2, 128, 2, False, 168, 240)
"""The plan for heads of 64 in `short_rows`. With 12 heads, 128 rows of 512 tokens take 264 us with this plan, 275 with
the usual one, and 356 in the portable kernel."""
_TWO_CONSUMERS: Final = ForwardPlan(2, 64, 3, False, 168, 240)
_WITH_DISTANCES: Final = {(128, 128, True): _TWO_CONSUMERS, (192, 192, False): _OF_256}
_WITH_DROPOUT: Final = {(64, 64, False): None, (128, 128, True): _TWO_CONSUMERS, (192, 192, False): _OF_256}
"""Plans that replace plans of `_FORWARD` in calls with distances (ALiBi) or dropout, which need registers that the
usual plan does not leave. `None`: there is no kernel."""
BACKWARD: Final = {
    64: BackwardPlan(q_tile=128),
    128: BackwardPlan(q_tile=64),
    192: BackwardPlan(q_tile=64, wide=True, kv_tile=64),
    256: BackwardPlan(q_tile=64, wide=True, kv_tile=64, dout_stages=1),
}
"""The plans by head size (`padded_size`). The accumulators of a step allow no larger tiles."""


def forward(constants: BlockConstants) -> ForwardPlan | None:
    """The plan of the forward kernel, or `None` where the kernel does not take these head sizes and options."""
    if constants.head_dim < 64 or constants.head_dim % 8 or constants.value_dim % 8:
        return None
    head_size, value_size = (int(padded_size(dim)) for dim in (constants.head_dim, constants.value_dim))
    sizes = head_size, value_size, constants.capped
    if short_rows(constants) and sizes in _FORWARD:
        return _SHORT
    usual = _FORWARD.get(sizes)
    if constants.dropout:
        return _WITH_DROPOUT.get(sizes, usual)
    return _WITH_DISTANCES.get(sizes, usual) if constants.distances else usual


def short_rows(constants: BlockConstants) -> bool:
    """Whether heads are of 64 and a row has 192 to 2,047 queries, which see all keys, as in encoders."""
    masked = any((constants.positions, constants.segments, constants.masks, constants.dropout))
    return constants.largest_dim == 64 and 192 <= constants.q_length < 2048 and not (masked or constants.capped)


def backward(constants: BlockConstants) -> BackwardPlan | None:
    """The plan of the one-pass backward kernel, or `None` where the kernel does not take these head sizes."""
    dim, value_dim = constants.head_dim, constants.value_dim
    plan = BACKWARD.get(int(padded_size(max(dim, value_dim) if dim > 128 else dim)))
    if plan is None or dim < 64 or dim % 8 or value_dim % 8:
        return None
    if plan.wide and constants.padded_value_dim == 128:
        return dataclasses.replace(plan, dout_stages=2)  # smaller values leave room for a second place
    return plan if constants.padded_value_dim == constants.padded_head_dim else None
