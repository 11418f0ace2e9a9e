# SPDX-License-Identifier: Apache-2.0
"""Memory of interpreted kernels: raises on accesses outside an operand and on races between programs."""

import dataclasses
import threading
from typing import Any

import numpy as np

from .types import OF_ARRAY, decoded, held, poison

_ADDING = threading.Lock()
"""A lock that is held during an addition, because the partitions of a program run concurrently and may add to the same
element."""


@dataclasses.dataclass
class Storage:
    """The elements of one array in row-major order, and which programs have written and read each of them.

    `written` and `read` hold a program number for each element: -1 if no program did, -2 if several did. `read` is
    `None` unless an operand and an output share the memory; `written` is `None` for an operand that shares with no
    output.
    """

    flat: np.ndarray
    written: np.ndarray | None = None
    read: np.ndarray | None = None

    @classmethod
    def of_operand(cls, array: np.ndarray) -> "Storage":
        return cls(decoded(array))

    @classmethod
    def of_output(cls, array: np.ndarray) -> "Storage":
        dtype = OF_ARRAY[array.dtype.name]
        return cls(np.full(array.size, poison(dtype), held(dtype)), np.full(array.size, -1, np.int32))

    @classmethod
    def of_alias(cls, array: np.ndarray) -> "Storage":
        """The storage that an output and an operand share; at first it holds the values of the operand, `array`."""
        nobody = np.full(array.size, -1, np.int32)
        return cls(decoded(array).copy(), nobody, nobody.copy())


class Buffer:
    """An operand of a launch, or a `writable` output, with its name. An operand and an output may share a storage."""

    def __init__(self, name: str, storage: Storage, dtype: Any, writable: bool, launch: Any) -> None:
        self.name = name
        self.storage = storage
        self.dtype = dtype
        self.writable = writable
        self.launch = launch
        self.pointer: Any = None

    def __str__(self) -> str:
        return f"operand {self.name!r} of kernel {self.launch.name}"

    def load(self, offsets: Any, mask: Any, other: Any) -> Any:
        """The elements at `offsets`, or `other` where `mask` is false (`None`: it is true everywhere)."""
        flat = self.storage.flat
        if mask is None:
            self._check("load", offsets)
            if self.storage.read is not None:
                self._note_read(offsets)
            return flat[offsets]
        safe = np.where(mask, offsets, 0)
        self._check("load", safe, mask)
        if self.storage.read is not None:
            self._note_read(safe[np.broadcast_to(mask, safe.shape)])
        if not flat.size:
            return np.broadcast_to(other, safe.shape)
        return np.where(mask, flat[safe], other)

    def store(self, offsets: Any, data: Any, mask: Any) -> None:
        if not self.writable:
            raise self._error(f"writes to {self}, which is not an output. List the output in `outputs`")
        if mask is not None:
            offsets, data, mask = np.broadcast_arrays(offsets, data, mask)
            offsets, data = offsets[mask], data[mask]
        self._check("store", offsets)
        self._note_write(offsets)
        self.storage.flat[offsets] = data

    def add(self, offsets: Any, data: Any, mask: Any) -> Any:
        """Adds atomically where `mask` is true, and returns the old elements. Any program may add to any element."""
        if not self.writable:
            raise self._error(f"adds to {self}, which is not an output. List the output in `outputs`")
        offsets, data, mask = np.broadcast_arrays(offsets, data, mask)
        with _ADDING:
            before = self.load(offsets, mask, 0)
            np.add.at(self.storage.flat, offsets[mask], data[mask])
        return before

    def _check(self, what: str, offsets: Any, mask: Any = None) -> None:
        size = self.storage.flat.size
        if not offsets.size or (mask is not None and not np.any(mask)):
            return
        low, high = np.minimum.reduce(offsets, None), np.maximum.reduce(offsets, None)
        if low < 0 or high >= size:
            worst = low if low < 0 else high
            raise self._error(
                f"{what}s element {worst} of {self}, which has {size}. Mask the access, or fix the offset", IndexError
            )

    def _note_read(self, offsets: Any) -> None:
        """Records a read of an operand that shares memory with an output; raises if a program has written there."""
        written, read, me = self.storage.written, self.storage.read, self.launch.program
        assert written is not None and read is not None
        if self.writable:
            return
        if np.any(written[offsets] != -1):
            raise self._error(f"reads {self} where a program has written the output that shares its memory")
        before = read[offsets]
        read[offsets] = np.where((before == -1) | (before == me), me, -2)

    def _note_write(self, offsets: Any) -> None:
        written, read, me = self.storage.written, self.storage.read, self.launch.program
        assert written is not None
        before = written[offsets]
        if np.any((before != -1) & (before != me)):
            raise self._error(f"writes to elements of {self} that another program has written")
        if read is not None:
            before = read[offsets]
            if np.any((before != -1) & (before != me)):
                raise self._error(f"writes to {self} where another program reads the operand that shares its memory")
        written[offsets] = me

    def _error(self, fact: str, kind: type[Exception] = RuntimeError) -> Exception:
        return kind(f"kernel {self.launch.name}: program {self.launch.where} {fact}.")
