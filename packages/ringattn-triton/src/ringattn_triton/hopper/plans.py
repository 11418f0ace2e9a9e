# SPDX-License-Identifier: Apache-2.0
# pyright: standard, reportUndefinedVariable=false, reportInvalidTypeForm=false
"""The plans of the Hopper kernels by head size and options: tiles, stages, registers and hardware barriers."""

import dataclasses
from typing import ClassVar, Final

import triton.language as tl
from ringattn_core.contract.protocol import Block

from ..kernel_inputs import BlockConstants
from .head_tiles import padded_size
from .layouts import CONSUMER_ROWS

PROGRAMS: Final = 132
"""The most programs of a launch: one for each multiprocessor of the largest Hopper GPU. On a smaller GPU the last
programs find no work."""
SQUARE: Final = tl.constexpr(64 * 64)
"""The numbers in a square of dq, 64 queries by 64 dimensions (`dq_order`)."""
SINGLE_WARP_REGISTERS: Final = tl.constexpr(24)
"""Registers of a thread of a producer or writer while a program runs."""


@dataclasses.dataclass(frozen=True)
class ForwardPlan:
    """Tile size, stages and registers of the forward kernel, and how it runs."""

    # What follows from the head sizes and options (`_FORWARD`).
    consumers: int
    kv_tile: int
    kv_stages: int
    in_rotation: bool
    """Consumers begin their products one after another."""
    q_stages: int = 2
    """With two, the next turn's queries are fetched before this turn ends; with one, those of a consumer when its last
    scores of this turn are computed."""

    # What follows from the call (`forward`); it may also replace `in_rotation` and `q_stages`.
    masked: bool = False
    """Some tiles may need a mask."""
    fresh: bool = False
    """There is no partial output to continue."""
    from_lse: bool = False
    """The softmax begins from a log-sum-exp, of a partial result or of sinks."""
    bounded: bool = False
    """Half of the soft cap, not the row maximum, is subtracted from scores."""
    results_by_tma: bool = False
    """The producer writes outputs by TMA, from shared memory; otherwise the consumers do, from registers."""
    one_sided: bool = False
    """Scores depend on distances, and no query sees a key after itself."""

    @property
    def q_tile(self) -> int:
        return self.consumers * CONSUMER_ROWS.value

    @property
    def registers_at_start(self) -> int:
        """Registers of each thread when a program begins."""
        return 128 if self.consumers == 3 else 168

    @property
    def registers(self) -> int:
        """Registers of a consumer's thread while the program runs: more, because the producer releases its own."""
        return 160 if self.consumers == 3 else 240

    @property
    def hardware_barriers(self) -> dict[str, tuple[int, int]]:
        """The first barrier of each name, and for how many threads it waits (`forward_kernel` has a table).

        Triton takes barriers from 0 on: one for all partitions, and one for each partition of several warps, three at
        most. Barrier 4 is free too. With three consumers and three stages, the last barrier, 15, is used: `rest_empty`
        comes last because such plans do not use it.
        """
        every = 32 + 128 * self.consumers
        counts = {"k_empty": (self.kv_stages, every), "v_empty": (self.kv_stages, every), "turn_done": (2, every)}
        counts |= {"order": (self.consumers, 256)} if self.in_rotation else {}
        counts |= {"q_empty": (self.consumers, 160)} if self.q_stages == 1 else {}
        return _numbered(5, counts | {"rest_empty": (1, every)})


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """The tile sizes, stages and registers of the one-pass backward kernel, and how it divides the work."""

    # What follows from the head sizes (`BACKWARD`).
    q_tile: int
    kv_tile: int = 128
    wide: bool = False
    """One consumer computes dv and the other dk, each of all keys (`backward_wide_products`). Otherwise each consumer
    computes both, for half of the keys."""
    dout_stages: int = 2
    """As many as `q_stages`, unless `wide`."""
    q_stages: ClassVar[int] = 2
    """No choice: hardware barriers, writers and `arrive_at_constant` alternate between two."""
    registers_at_start: ClassVar[int] = 168
    """Registers of each thread when a program begins."""
    registers: ClassVar[int] = 240
    """Registers of a consumer's thread while the program runs: more, because the other warps release theirs."""

    # The order of turns (`turn_order.arranged`).
    ordered: bool = False
    """Turns add to dq in the order in which they are taken, so that every run gives the same bits."""
    heads_inside: bool = False
    """A turn visits a query tile for all heads of its group before the next tile, not all tiles for a head first."""
    upwards: bool = False
    """All but the heads that run last take the turns of their last keys first (`backward_turns.steps_of`)."""
    interleaved: bool = False
    """Short turns of some heads are taken between the long turns of the next (`backward_turns.take_turn`)."""
    abreast: int = 1
    """How many neighbouring key tiles of a head begin together."""

    # What follows from the call (`backward`).
    masked: bool = False
    """Some tiles may need a mask."""
    query_kinds: tuple[str, ...] = ()
    """Which values a step reads for each query besides lse and delta: "offset" of its position from that of the tile's
    first query, the lowest and highest position that it sees ("low", "high"), "segment"."""
    subtracting: bool = False
    """The tensor cores subtract lse and delta (`backward_products.subtract`)."""
    results_by_tma: bool = False
    """The writers write dk and dv by TMA, from shared memory; otherwise the consumers do, from registers."""
    strip_rows: int = 0
    """A launch computes so many key tiles and stores their ds; 0: it computes all key tiles and stores no ds."""

    @property
    def dout_first(self) -> int:
        """The first stage of dout in its allocation. Unless `wide`, that is the queries' allocation."""
        return 0 if self.wide else self.q_stages

    @property
    def v_first(self) -> int:
        """The stage of values in its allocation. Unless `wide`, that is the allocation of the keys."""
        return 0 if self.wide else 1

    @property
    def value_stages(self) -> dict[str, tuple[int, int]]:
        """For "lse", "delta" and each of `query_kinds`: its first stage in `BackwardMemory.per_query`, and how many."""
        counts = {} if self.subtracting else {"lse": self.q_stages, "delta": self.dout_stages}
        counts |= dict.fromkeys(self.query_kinds, self.q_stages)
        return _numbered(0, {name: (count, count) for name, count in counts.items()})

    def squares(self, dim: int) -> int:
        """In how many squares of 64 queries by 64 dimensions a tile of dq is added to memory; `dim` is the head
        size."""
        return self.q_tile // 64 * -(-dim // 64)

    @property
    def hardware_barriers(self) -> dict[str, tuple[int, int]]:
        """The first barrier of each name, and for how many threads it waits (`backward_kernel` has a table).

        "dq_full" has four: at number `2 c + w`, consumer `c` tells writer `w`. Triton takes barriers 0 to 2: one for
        all partitions, and one for each of the two that have several warps.
        """
        counts = {"weights_empty": (1, 256), "ds_full": (1, 256), "q_empty": (2, 288), "dout_empty": (2, 288)}
        return _numbered(3, counts | {"dq_empty": (2, 160), "weights_full": (1, 256), "dq_full": (4, 160)})


def _numbered(first: int, counts: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """Numbers the names from `first` on. `counts[name]` is (how many, a value); found is (first, value)."""
    found = {}
    for name, (count, what) in counts.items():
        found[name] = first, what
        first += count
    return found


_OF_256: Final = ForwardPlan(2, 64, 2, False, 1)
_FORWARD: Final = {
    (64, 64, False): ForwardPlan(3, 128, 2, True),
    (128, 128, False): ForwardPlan(2, 128, 2, True),
    (128, 128, True): ForwardPlan(3, 64, 3, True),
    (192, 128, False): ForwardPlan(2, 128, 2, True, 1),
    (192, 192, False): ForwardPlan(2, 128, 2, True, 1),
    (192, 256, False): _OF_256,
    (256, 128, False): ForwardPlan(2, 64, 3, False, 1),
    (256, 192, False): _OF_256,
    (256, 256, False): _OF_256,
}
"""The plans by head size of keys and of values (`padded_size`), and by whether there is a soft cap."""
_SHORT: Final = ForwardPlan(2, 128, 2, False)
"""The plan for heads of 64 in `short_rows`."""
_FEWER_REGISTERS: Final = {(128, 128, True): ForwardPlan(2, 64, 3, False), (192, 192, False): _OF_256}
"""Plans that replace plans of `_FORWARD` in calls with ALiBi or dropout, which need registers that the usual plan does
not leave."""
BACKWARD: Final = {
    64: BackwardPlan(q_tile=128),
    128: BackwardPlan(q_tile=64),
    192: BackwardPlan(q_tile=64, kv_tile=64, wide=True),
    256: BackwardPlan(q_tile=64, kv_tile=64, wide=True, dout_stages=1),
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
    if constants.dropout and head_size == value_size == 64:
        return None
    usual = _FORWARD.get(sizes)
    return _FEWER_REGISTERS.get(sizes, usual) if constants.dropout or constants.slopes else usual


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
        return dataclasses.replace(plan, dout_stages=2)  # smaller values leave room for a second stage
    return plan if constants.padded_value_dim == constants.padded_head_dim else None


def why_not_bias(block: Block, constants: BlockConstants, kernel: str) -> str | None:
    """Why a Hopper kernel cannot read the bias of `block`, or `None` if it can.

    It takes no bias in a call that also has a soft cap, ALiBi or dropout. For TMA the bias must have the dtype of q,
    one row for each query, and a multiple of eight keys. `kernel` names the kernel in the reason.
    """
    assert block.bias is not None
    if constants.capped or constants.slopes or constants.dropout:
        return f"the {kernel} kernel does not combine {constants.options}"
    aligned = constants.bias_query == constants.kv_length and constants.kv_length % 8 == 0
    return None if aligned and block.bias.dtype == block.q.dtype else "the bias cannot be fetched in tiles"
