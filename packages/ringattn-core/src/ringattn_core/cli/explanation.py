# SPDX-License-Identifier: Apache-2.0
"""What `ringattn explain` found out: plain frozen data, which text, pictures and JSON are made from."""

import dataclasses
from typing import Any, Final

import numpy as np

from .request import Request

SKIPPED, MASKED, WHOLE = 0, 1, 2
"""What becomes of a tile: not computed, computed with a mask, computed without one."""
WORDS: Final = {WHOLE: "computed without a mask", MASKED: "masked, or in part skipped", SKIPPED: "skipped"}
"""What a cell of a picture says, where one may stand for several tiles."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A registered backend, and why it does not run this call; `None` where it can."""

    name: str
    distribution: str
    version: str
    priority: int | None
    reason: str | None
    gradients: bool


@dataclasses.dataclass(frozen=True)
class Message:
    """What every rank sends to the rank `shift` onward, or back: keys and values, gradients of them, or both."""

    shift: int
    keys: bool
    gradients: bool
    bytes: int


@dataclasses.dataclass(frozen=True)
class Hop:
    """Rank `r` works on the keys of rank `r - offset`; for each rank, how many tiles, and how many without a mask.

    Of two with one `number`, each is of half of the heads.
    """

    number: int
    offset: int
    ways: int
    tiles: tuple[int, ...]
    whole: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Held:
    """Arrays that one device holds, all of that description together; `phase` is call, forward or backward."""

    phase: str
    what: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The temporary memory of one device as XLA plans it, in bytes: forward alone, and forward with backward.

    `None` where there is no backward, and where XLA does not say.
    """

    devices: str
    forward: int | None
    both: int | None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What would run where.

    `choice` is the backend that the call gets, or else `refusal` says why it gets none; `own_ring` says that the choice
    drives a ring of its own, of which core knows nothing. `lengths` are the queries and keys of one rank, padding
    included, and `tile` queries by keys. `skipped` are the offsets at which no query can see any key. `gathered` are
    the bytes of ids and positions that each rank gets of the others, once, before the first hop. `states` holds
    `SKIPPED`, `MASKED` or `WHOLE`: `[ranks, hops, q tiles, key tiles]`, for the first batch row and all heads together.
    """

    request: Request
    platform: str
    needs: tuple[str, ...]
    candidates: tuple[Candidate, ...]
    choice: str | None
    refusal: str | None
    own_ring: bool
    lengths: tuple[int, int]
    tile: tuple[int, int]
    hops: tuple[Hop, ...]
    skipped: tuple[int, ...]
    forward: tuple[Message, ...]
    backward: tuple[Message, ...]
    gathered: int
    memory: tuple[Held, ...]
    compiled: Compiled | None
    states: np.ndarray = dataclasses.field(repr=False, compare=False)

    @property
    def ranks(self) -> int:
        return self.request.ring

    @property
    def grid(self) -> int:
        """The tiles of one rank at one hop, skipped ones included."""
        return self.states.shape[2] * self.states.shape[3]

    @property
    def of_ranks(self) -> tuple[int, ...]:
        """The tiles that each rank computes, over all hops; those of half of the heads count half, rounded up."""
        return tuple(-(-sum(counts) // 2) for counts in zip(*self._halves().values(), strict=True))

    @property
    def slowest(self) -> int:
        """The tiles that a ring in lockstep waits for: of the busiest rank, hop by hop."""
        return -(-sum(map(max, self._halves().values())) // 2)

    def _halves(self) -> dict[int, list[int]]:
        """The tiles of each rank at each hop by number, counted in halves."""
        found = {hop.number: [0] * self.ranks for hop in self.hops}
        for hop in self.hops:
            counts = zip(found[hop.number], hop.tiles, strict=True)
            found[hop.number] = [before + 2 * count // hop.ways for before, count in counts]
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data; of the states only the counts."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "states"]
        plain = {name: _plain(getattr(self, name)) for name in names}
        return plain | {"tiles_of_ranks": list(self.of_ranks), "tiles_of_slowest": self.slowest}


def _plain(x: Any) -> Any:
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        return dataclasses.asdict(x)
    return [_plain(item) for item in x] if isinstance(x, tuple) else x
