# SPDX-License-Identifier: Apache-2.0
"""What the names of Gluon mean in an interpreted kernel: shared memory, barriers, fetches, products that run on.

The partitions of a program run as threads. A product that was begun reads its operands when it is waited for, as late
as a device may; a fetch writes at once, as early as one may. So a place that is given up too early, or read too early,
shows. Where all partitions wait for each other an error says so.
"""

import collections
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from triton import language as tl

from . import language, mathematics
from .language import current
from .types import held
from .values import Pointer, Tensor, cast, constant, plain


class Team:
    """The partitions of one program: who runs, who waits, and what went wrong."""

    def __init__(self, size: int) -> None:
        self.changed = threading.Condition()
        self.running = size
        self.error: BaseException | None = None
        self.waiting: dict[int, Barrier] = {}

    def wait(self, barrier: "Barrier", parity: int) -> None:
        """Until the barrier has completed a phase of this parity last."""
        me = threading.get_ident()
        with self.changed:
            while barrier.phase % 2 == parity and self.error is None:
                self.waiting[me] = barrier
                if len(self.waiting) == self.running:
                    self.fail(RuntimeError(f"kernel {current.launch.name}: its partitions all wait for each other"))
                    break
                self.changed.wait()
                self.waiting.pop(me, None)
            self.waiting.pop(me, None)
            if self.error is not None:
                raise _Stopped

    def fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self.changed.notify_all()


class _Stopped(Exception):
    """Ends a partition because another one failed."""


class Barrier:
    """Completes a phase after so many arrivals and all bytes that they announced."""

    def __init__(self) -> None:
        self.count = self.left = self.bytes = self.phase = 0

    def arrived(self, arrivals: int, announced: int = 0, delivered: int = 0) -> None:
        team = _team()
        with team.changed:
            if not self.count:
                raise RuntimeError(f"kernel {current.launch.name} uses a barrier that was not initialised")
            self.left -= arrivals
            self.bytes += announced - delivered
            if self.left < 0:
                raise RuntimeError(f"kernel {current.launch.name}: more arrive at a barrier than it counts")
            if self.left == 0 and self.bytes == 0:
                self.left = self.count
                self.phase += 1
                # Whoever sees that has to look again before all are said to wait.
                team.waiting = {me: barrier for me, barrier in team.waiting.items() if barrier is not self}
                team.changed.notify_all()


class Shared:
    """Shared memory of one type, or a part of it; `barriers` where it holds those."""

    def __init__(self, data: np.ndarray, dtype: Any) -> None:
        self.data = data
        self.dtype = dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def index(self, place: Any) -> "Shared":
        number = int(constant(place).__index__())
        if not 0 <= number < self.data.shape[0]:
            raise IndexError(f"kernel {current.launch.name} has no place {number} of {self.data.shape[0]}")
        return Shared(self.data[number], self.dtype)

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(np.transpose(self.data, [plain(axis) for axis in order]), self.dtype)

    def load(self, layout: Any) -> Tensor:
        return Tensor(self.data.copy(), self.dtype)

    def store(self, value: Tensor) -> None:
        if value.dtype != self.dtype:
            raise TypeError(f"shared memory of {self.dtype} cannot hold {value.dtype}")
        self.data[...] = value.data


class Product:
    """A product that was begun; nothing but a wait makes numbers of it."""

    def __init__(self, found: Callable[[], Tensor]) -> None:
        self._found = found
        self.value: Tensor | None = None

    def finish(self) -> None:
        self.value = self._found()


class Descriptor:
    """A matrix in global memory that is fetched by tiles; past its end there are zeros."""

    def __init__(self, base: Pointer, shape: Sequence[Any], strides: Sequence[Any], block: Sequence[Any]) -> None:
        self.base = base
        self.shape = [int(constant(size).__index__()) for size in shape]
        self.strides = [int(constant(step).__index__()) for step in strides]
        self.block = [plain(size) for size in block]
        width = 2 if base.buffer.dtype in (tl.float16, tl.bfloat16) else 4
        if any(step * width % 16 for step in self.strides[:-1]) or self.strides[-1] != 1:
            raise ValueError(f"kernel {current.launch.name}: a descriptor's strides {self.strides} are not of 16 bytes")
        self.bytes = int(np.prod(self.block)) * width

    def tile(self, at: Sequence[Any]) -> Any:
        starts = [int(constant(start).__index__()) for start in at]
        ranges = np.meshgrid(
            *(start + np.arange(size) for start, size in zip(starts, self.block, strict=True)), indexing="ij"
        )
        inside = np.logical_and.reduce([(r >= 0) & (r < size) for r, size in zip(ranges, self.shape, strict=True)])
        offsets = sum(r * step for r, step in zip(ranges, self.strides, strict=True))
        return self.base.buffer.load(self.base.data + offsets, inside, 0)


def _team() -> Team:
    return getattr(current, "team", None) or _ALONE


_ALONE = Team(1)
"""Before partitions begin, when barriers are initialised."""


def warp_specialize(partitions: Sequence[tuple[Any, tuple[Any, ...]]], warps: Any, registers: Any = None) -> None:
    team, launch = Team(len(partitions)), current.launch

    def work(function: Any, arguments: tuple[Any, ...]) -> None:
        current.launch, current.team, current.products = launch, team, collections.deque()
        try:
            with np.errstate(all="ignore"):
                function(*arguments)
            if current.products:
                raise RuntimeError(f"kernel {launch.name} ends before its products do")
        except _Stopped:
            pass
        except BaseException as error:
            with team.changed:
                team.fail(error)
        finally:
            with team.changed:
                team.running -= 1
                if team.running and len(team.waiting) == team.running:
                    team.fail(RuntimeError(f"kernel {launch.name}: partitions wait for one that has ended"))

    threads = [threading.Thread(target=work, args=partition, daemon=True) for partition in partitions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if team.error is not None:
        raise team.error


def allocate_shared_memory(element_ty: Any, shape: Sequence[Any], layout: Any, value: Any = None) -> Shared:
    sizes = [plain(size) for size in shape]
    if type(layout).__name__ == "MBarrierLayout":
        barriers = np.empty(sizes, object)
        for at in np.ndindex(*sizes):
            barriers[at] = Barrier()
        return Shared(barriers, element_ty)
    kind = held(element_ty)
    nothing = np.nan if np.issubdtype(kind, np.floating) else np.iinfo(kind).max
    return Shared(np.full(sizes, nothing, kind), element_ty)


def _barrier(shared: Shared) -> Barrier:
    return shared.data.item()


def init(mbarrier: Shared, count: Any) -> None:
    barrier = _barrier(mbarrier)
    barrier.count = barrier.left = plain(count)


def expect(mbarrier: Shared, bytes: Any, pred: Any = True) -> None:
    _barrier(mbarrier).arrived(1, announced=plain(bytes))


def arrive(mbarrier: Shared, *, count: Any = 1, pred: Any = True) -> None:
    _barrier(mbarrier).arrived(plain(count))


def wait(mbarrier: Shared, phase: Any) -> None:
    _team().wait(_barrier(mbarrier), int(constant(phase).__index__()))


def make_tensor_descriptor(base: Pointer, shape: Any, strides: Any, block_shape: Any, layout: Any) -> Descriptor:
    return Descriptor(base, shape, strides, block_shape)


def async_load(descriptor: Descriptor, coord: Any, barrier: Shared, result: Shared, pred: Any = True) -> None:
    result.data[...] = descriptor.tile(coord)
    _barrier(barrier).arrived(0, delivered=descriptor.bytes)


async_copy_global_to_shared = async_load


def fence_async_shared(cluster: bool = False) -> None: ...


def warpgroup_mma(a: Any, b: Shared, acc: Tensor, *, use_acc: Any = True, is_async: Any = False) -> Any:
    added = acc if constant(use_acc) else None

    def found() -> Tensor:
        left, right = (Tensor(x.data.copy(), x.dtype) if isinstance(x, Shared) else x for x in (a, b))
        return mathematics.dot(left, right, added)

    product = Product(found)
    if not constant(is_async):
        product.finish()
        return product.value
    current.products.append(product)
    return product


def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Sequence[Any] = ()) -> Any:
    """The values of `deps`, when no more than so many products are still under way."""
    while len(current.products) > plain(num_outstanding):
        current.products.popleft().finish()
    values = [dep.value if isinstance(dep, Product) else dep for dep in deps]
    if any(value is None for value in values):
        raise RuntimeError(f"kernel {current.launch.name} takes a product for which it has not waited")
    return values[0] if len(values) == 1 else tuple(values)


def arange(start: Any, end: Any, layout: Any = None) -> Tensor:
    return language.arange(start, end)


def full(shape: Any, value: Any, dtype: Any, layout: Any = None) -> Tensor:
    return language.full(shape, value, dtype)


def zeros(shape: Any, dtype: Any, layout: Any = None) -> Tensor:
    return language.full(shape, 0, dtype)


def convert_layout(value: Tensor, layout: Any, assert_trivial: bool = False) -> Tensor:
    return cast(value, value.dtype)
