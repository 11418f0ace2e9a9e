# SPDX-License-Identifier: Apache-2.0
"""The functions of Gluon over NumPy arrays and threads: shared memory, barriers, TMA fetches, asynchronous products.

The partitions of a program run as threads. An asynchronous product reads its operands only when its partition waits for
the product, as late as a device may. A fetch at once overwrites its place in shared memory with NaN, and fills the
place only when a partition waits for the fetch's barrier. So a kernel that releases or reads a place too early gets
wrong results. A product of what its own partition has stored in shared memory raises an error if no fence is between.
If all partitions wait for each other, an error says so.
"""

import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn

import numpy as np

from . import mathematics
from .barriers import Barrier, Team, error
from .language import current
from .types import held, poison
from .values import Pointer, Tensor, cast, constant, plain

HARDWARE_BARRIERS: Final = 16
"""How many hardware barriers a program has on NVIDIA GPUs."""


class Shared:
    """An allocation of shared memory for elements of one type, or a part of such an allocation."""

    def __init__(self, data: np.ndarray, dtype: Any, covered: np.ndarray | None = None) -> None:
        """Wraps `data`. `covered`, or `None`, is memory of another type in the same place.

        If `covered` is written to, this memory becomes invalid: it is filled with NaN.
        """
        self.data = data
        self.dtype = dtype
        self.covered = covered

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def index(self, place: Any) -> "Shared":
        number = _integer(place)
        if not 0 <= number < self.data.shape[0]:
            raise error(f"takes place {number} of {self.data.shape[0]} in shared memory", IndexError)
        return Shared(self.data[number], self.dtype)

    def slice(self, start: Any, length: Any, dim: Any = 0) -> "Shared":
        """The `length` elements from `start` on along axis `dim`; all three must be known at compile time."""
        first, axis = plain(start), plain(dim)
        last = first + plain(length)
        if not 0 <= first < last <= self.data.shape[axis]:
            raise error(f"slices {first} to {last} of {self.data.shape[axis]} in shared memory", IndexError)
        return Shared(self.data[(slice(None),) * axis + (slice(first, last),)], self.dtype)

    def permute(self, order: Sequence[int]) -> "Shared":
        return Shared(np.transpose(self.data, [plain(axis) for axis in order]), self.dtype)

    def reshape(self, shape: Sequence[Any]) -> "Shared":
        """A view of the same memory in another shape; raises if only a copy could have that shape."""
        view = self.data.reshape([plain(size) for size in shape])
        if not np.may_share_memory(view, self.data):
            raise error(f"reshapes {list(self.data.shape)}, which does not lie in one piece")
        return Shared(view, self.dtype, self.covered)

    def reinterpret(self, dtype: Any, shape: Sequence[Any], layout: Any) -> "Shared":
        """A view of the same place for values of type `dtype`.

        It makes this view's values invalid. A later write to this view makes the new view's values invalid.
        """
        sizes = tuple(plain(size) for size in shape)
        self.spoil()
        key = self.data.ctypes.data, dtype.name, sizes
        return Shared(current.team.covers.setdefault(key, np.empty(sizes, held(dtype))), dtype, self.data)

    _reinterpret = reinterpret

    def load(self, layout: Any) -> Tensor:
        if self.covered is not None and not np.isnan(self.covered).all():
            self.spoil()
        return Tensor(self.data.copy(), self.dtype)

    def store(self, value: Tensor) -> None:
        """Stores `value`. A product that reads stored floats before the next fence raises: a GPU may misread."""
        self.fill(value)
        if self.dtype.is_floating():
            current.unfenced.append(self.data)

    def fill(self, value: Tensor) -> None:
        if value.dtype != self.dtype or value.shape != self.shape:
            fact = f"puts {value.dtype}{list(value.shape)} into shared memory of {self.dtype}{list(self.shape)}"
            raise error(fact, TypeError)
        self.data[...] = value.data

    def spoil(self) -> None:
        self.data[...] = poison(self.dtype)


class Product:
    """An asynchronous product that has begun. It has a value after `warpgroup_mma_wait`; any use before then raises."""

    def __init__(self, found: Callable[[], Tensor]) -> None:
        self._found = found
        self.value: Tensor | None = None

    def finish(self) -> None:
        self.value = self._found()

    def taken(self) -> Tensor:
        if self.value is None:
            self._refuse()
        return self.value

    def __repr__(self) -> str:
        return "a product for which it has not waited"

    def _refuse(self, *_: Any) -> NoReturn:
        raise error(f"takes {self}")

    __getattr__ = __abs__ = __neg__ = __getitem__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _refuse


class Descriptor:
    """A TMA descriptor: an array in global memory, read and written by tiles. Reads past its end give zeros."""

    def __init__(self, base: Pointer, shape: Sequence[Any], strides: Sequence[Any], block: Sequence[Any]) -> None:
        self.base = base
        self.dtype = base.buffer.dtype
        self.shape = [_integer(size) for size in shape]
        self.strides = [_integer(step) for step in strides]
        self.block = [plain(size) for size in block]
        width = self.dtype.primitive_bitwidth // 8
        if any(step * width % 16 for step in self.strides[:-1]) or self.strides[-1] != 1:
            fact = f"describes a matrix of {self.dtype} with strides {self.strides}: the last is to be 1"
            raise error(f"{fact}, the others multiples of 16 bytes", ValueError)
        if int(base.data) * width % 16:
            raise error(f"describes a matrix from element {base.data} on, no multiple of 16 bytes", ValueError)
        self.bytes = int(np.prod(self.block)) * width

    def tile(self, at: Sequence[Any]) -> Tensor:
        inside, offsets = self._places(at)
        return Tensor(self.base.buffer.load(self.base.data + offsets, inside, 0), self.dtype)

    def _places(self, at: Sequence[Any]) -> tuple[np.ndarray, Any]:
        """For each element of the tile that begins at `at`: whether it is inside the array, and its offset."""
        starts = [_integer(start) for start in at]
        ranges = np.meshgrid(
            *(start + np.arange(size) for start, size in zip(starts, self.block, strict=True)), indexing="ij"
        )
        inside = np.logical_and.reduce([(r >= 0) & (r < size) for r, size in zip(ranges, self.shape, strict=True)])
        return inside, sum(r * step for r, step in zip(ranges, self.strides, strict=True))

    def put(self, at: Sequence[Any], source: Shared) -> None:
        """Writes the tile `source` to global memory, without its elements past the end of the array."""
        inside, offsets = self._places(at)
        self.base.buffer.store(self.base.data + np.where(inside, offsets, 0), source.load(None).data, inside)

    def add(self, at: Sequence[Any], source: Shared) -> None:
        """Adds the tile `source` to global memory, without its elements past the end of the array."""
        inside, offsets = self._places(at)
        self.base.buffer.add(self.base.data + np.where(inside, offsets, 0), source.data, inside)


def _integer(value: Any) -> int:
    return operator.index(constant(value))


def run_program(function: Any, pointers: Sequence[Any], constants: Mapping[str, Any]) -> None:
    """Runs one program of a launch as a `Team` of one. Partitions that the program starts form another team."""
    team = Team(1)
    team.run(function, pointers, constants)
    team.finish()


def warp_specialize(partitions: Sequence[tuple[Any, tuple[Any, ...]]], warps: Any, registers: Any = None) -> None:
    team, launch = Team(len(partitions)), current.launch

    def work(function: Any, arguments: tuple[Any, ...], size: int) -> None:
        current.launch, current.threads = launch, 32 * size
        failure = None
        try:
            with np.errstate(all="ignore"):
                team.run(function, arguments, {})
        except BaseException as raised:
            failure = raised
        team.ended(failure)

    sizes = (launch.warps, *map(plain, warps))
    threads = [
        threading.Thread(target=work, args=(*partition, size), daemon=True)
        for partition, size in zip(partitions, sizes, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    team.finish()


def allocate_shared_memory(element_ty: Any, shape: Sequence[Any], layout: Any) -> Shared:
    sizes = [plain(size) for size in shape]
    if type(layout).__name__ == "MBarrierLayout":
        barriers = np.empty(sizes, object)
        for at in np.ndindex(*sizes):
            barriers[at] = Barrier()
        return Shared(barriers, element_ty)
    shared = Shared(np.empty(sizes, held(element_ty)), element_ty)
    shared.spoil()
    return shared


def fence_async_shared() -> None:
    current.unfenced.clear()


def _barrier(shared: Shared) -> Barrier:
    return shared.data.item()


def init(mbarrier: Shared, count: Any) -> None:
    _barrier(mbarrier).begin(plain(count))


def expect(mbarrier: Shared, bytes: Any) -> None:
    _barrier(mbarrier).arrived(1, announced=plain(bytes))


def arrive(mbarrier: Shared, *, count: Any = 1) -> None:
    _barrier(mbarrier).arrived(plain(count))


def wait(mbarrier: Shared, phase: Any) -> None:
    current.team.wait(_barrier(mbarrier), _integer(phase))


def make_tensor_descriptor(base: Pointer, shape: Any, strides: Any, block_shape: Any, layout: Any) -> Descriptor:
    return Descriptor(base, shape, strides, block_shape)


def async_load(descriptor: Descriptor, coord: Any, barrier: Shared, result: Shared) -> None:
    reached, tile = _barrier(barrier), descriptor.tile(coord)
    result.spoil()

    def arrive() -> None:
        result.fill(tile)
        reached.arrived(0, delivered=descriptor.bytes)

    reached.fetching(arrive)


async_copy_global_to_shared = async_load


def async_atomic_add(tensor_desc: Descriptor, coord: Sequence[Any], src: Shared) -> None:
    """Begins to add tile `src` to global memory. `src` is read only at `store_wait`, as late as a device may."""
    at = [_integer(start) for start in coord]
    current.additions.append(lambda: tensor_desc.add(at, src))


def async_store(tensor_desc: Descriptor, coord: Sequence[Any], src: Shared) -> None:
    """Begins to write tile `src` to global memory. `src` is read only at `store_wait`, as late as a device may."""
    at = [_integer(start) for start in coord]
    current.additions.append(lambda: tensor_desc.put(at, src))


async_copy_shared_to_global = async_store


def store_wait(pendings: Any) -> None:
    """Waits until at most `pendings` of the additions and stores that this partition began are still to be done."""
    while len(current.additions) > plain(pendings):
        current.additions.popleft()()


def wait_for_additions() -> None:
    store_wait(0)


def opaque_zero() -> int:
    return 0


def hardware_barrier(action: str, number: Any, threads: Any) -> None:
    """This partition arrives at hardware barrier `number`, with all its threads.

    If `action` is "sync", it then waits until `threads` threads have arrived in all; if "arrive", it goes on.
    """
    team = current.team
    if not 0 <= _integer(number) < HARDWARE_BARRIERS:
        raise error(f"names hardware barrier {_integer(number)}, and there are {HARDWARE_BARRIERS}, from 0 on")
    with team.changed:
        barrier = team.hardware.setdefault(_integer(number), Barrier())
        if not barrier.count:
            barrier.begin(plain(threads))
        if barrier.count != plain(threads):
            raise error(f"has a hardware barrier for {plain(threads)} threads and for {barrier.count}")
        before = barrier.phase % 2
        barrier.arrived(current.threads)
    if action == "sync":
        team.wait(barrier, before)


def arrive_at_constant(name: str, stage: Any, plan: Any, start: int = 0) -> None:
    first, threads = plan.hardware_barriers[name]
    hardware_barrier("arrive", first + start + (_integer(stage) != 0), threads)


def warpgroup_mma(a: Any, b: Shared, acc: Tensor, *, is_async: Any, use_acc: Any = True) -> Product:
    used = bool(constant(use_acc))
    for place in (a, b):
        if isinstance(place, Shared) and any(np.may_share_memory(place.data, x) for x in current.unfenced):
            raise error("multiplies what was put into shared memory, with no fence between")

    def found() -> Tensor:
        left, right = (x.load(None) if isinstance(x, Shared) else x for x in (a, b))
        added = acc.taken() if isinstance(acc, Product) else acc
        return mathematics.dot(left, right, added if used else None)

    current.products.append(Product(found))
    return current.products[-1]


def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Sequence[Any] = ()) -> Any:
    """Waits until at most `num_outstanding` products of this partition are in flight. Returns the values of `deps`."""
    while len(current.products) > plain(num_outstanding):
        current.products.popleft().finish()
    values = [dep.taken() if isinstance(dep, Product) else dep for dep in deps]
    return values[0] if len(values) == 1 else tuple(values)


def convert_layout(value: Tensor, layout: Any) -> Tensor:
    return cast(value, value.dtype)


def product_where_needed(acc: Any, factor: Any) -> Tensor:
    """`acc * factor`. (A device skips the multiplication in a warp whose factors are all 1.)"""
    return acc * factor


def softmax_first(step: Any) -> None:
    """Does nothing. (On a device it only changes the order of instructions.)"""
