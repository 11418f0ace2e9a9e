# SPDX-License-Identifier: Apache-2.0
"""The partitions of an interpreted program, as threads that wait for each other at barriers."""

import collections
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from .language import current

_MANY_LOOKS: Final = 10_000
"""After so many volatile loads of the same number from the same place, a partition counts as waiting. Waits that end by
themselves look less often."""


class Team:
    """The partitions of one program: how many run, which of them wait, and their first error.

    `waiting` holds the threads that have looked at their barrier and found its phase incomplete. Any change of a
    barrier empties the set, and all threads look again. `looking` holds the threads that load a number from memory
    again and again. If the two sets hold every running thread, no thread can go on.
    """

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.size = self.running = size
        self.error: BaseException | None = None
        self.waiting: set[int] = set()
        self.looking: set[int] = set()
        self.fetched: set[Barrier] = set()
        self.hardware: dict[int, Barrier] = {}
        self.covers: dict[Any, Any] = {}

    def run(self, function: Any, arguments: Sequence[Any], constants: Mapping[str, Any]) -> None:
        """Runs one partition in this thread, or the part of a program before it starts partitions."""
        current.team, current.products, current.unfenced = self, collections.deque(), []
        current.additions = collections.deque()
        function(*arguments, **constants)
        if current.additions:
            raise error("ends before what it adds to memory has arrived there")
        if current.products:
            raise error("ends before its products do")

    def wait(self, barrier: "Barrier", parity: int) -> None:
        """Blocks until the phase that `barrier` has completed last has this parity. (The first phase has parity 0.)"""
        with self.changed:
            while not barrier.has_completed(parity) and self.error is None:
                self.waiting.add(threading.get_ident())
                if len(self.waiting) == self.running:
                    raise self.stuck()
                self.changed.wait()
            if self.error is not None:
                raise Stopped

    def looked(self, at_and_found: tuple[int, ...]) -> None:
        """Records a volatile load. Raises if nothing can change its number: programs run one after the other."""
        last, times = getattr(current, "looks", (None, 0))
        times = times + 1 if at_and_found == last else 0
        current.looks = at_and_found, times
        with self.changed:
            if self.error is not None:
                raise Stopped
            if times < _MANY_LOOKS:
                self.looking.discard(threading.get_ident())
                return
            self.looking.add(threading.get_ident())
            if len(self.waiting | self.looking) == self.running:
                raise error("waits for ever: no program before it has written the number that it waits for")

    def look_again(self) -> None:
        self.waiting.clear()
        self.changed.notify_all()

    def ended(self, error: BaseException | None) -> None:
        """Records that a partition has ended. After an error the others stop, else they check if they are stuck."""
        with self.changed:
            self.running -= 1
            self.looking.discard(threading.get_ident())
            if self.error is None:
                self.error = error
            self.changed.notify_all()

    def stuck(self) -> Exception:
        others = "all wait for each other" if self.running == self.size else "wait for one that has ended"
        return error(f"waits for ever: its partitions {others}")

    def finish(self) -> None:
        """Raises the first error of a partition, or an error if no partition waited for the bytes of a fetch."""
        if self.error is not None:
            raise self.error
        if any(barrier.fetches or barrier.bytes for barrier in self.fetched):
            raise error("ends before its fetches do: nobody waits for their bytes")


class Stopped(Exception):
    """Raised in a partition to end it, because another partition has failed."""


def error(fact: str, kind: type[Exception] = RuntimeError) -> Exception:
    return kind(f"kernel {current.launch.name}, program {current.launch.where} {fact}")


class Barrier:
    """A barrier that completes a phase when `count` arrivals, and all bytes that arrivals have announced, have come."""

    def __init__(self) -> None:
        self.fetches: collections.deque[Callable[[], None]] = collections.deque()
        self.begin(0)

    def begin(self, count: int) -> None:
        self.count = self.left = count
        self.bytes = self.phase = 0

    def arrived(self, arrivals: int, announced: int = 0, delivered: int = 0) -> None:
        with current.team.changed:
            self._need_begun()
            self.left -= arrivals
            self.bytes += announced - delivered
            if self.left < 0:
                raise error(f"arrives more often at a barrier than the {self.count} times that it counts")
            if self.left == 0 and self.bytes == 0:
                self.left = self.count
                self.phase += 1
                current.team.look_again()

    def fetching(self, arrive: Callable[[], None]) -> None:
        """Queues `arrive`, the arrival of a fetch, until a partition waits at this barrier."""
        with current.team.changed:
            self._need_begun()
            self.fetches.append(arrive)
            current.team.fetched.add(self)
            current.team.look_again()

    def has_completed(self, parity: int) -> bool:
        """Whether the last completed phase has this parity; before any is completed, only parity 1 gives true.

        Queued fetches arrive, one after the other, until it is true.
        """
        self._need_begun()
        if parity not in (0, 1):
            raise error(f"waits for a phase of parity {parity}; parities are 0 and 1", ValueError)
        while self.phase % 2 == parity and self.fetches:
            self.fetches.popleft()()
        return self.phase % 2 != parity

    def _need_begun(self) -> None:
        if not self.count:
            raise error("uses a barrier that was not initialised")
