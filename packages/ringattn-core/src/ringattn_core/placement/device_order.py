# SPDX-License-Identifier: Apache-2.0
"""Orders the devices of a grid into rings with short hops, also from the last rank to the first."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

from ..errors import MeshError

Cell = tuple[int, ...]


def rings(devices: Sequence[Any], ranks: int) -> list[list[Any]]:
    """Splits devices into rings of `ranks` each, by their `slice_index`, `coords` and `core_on_chip`.

    A ring fills a box of the grid within one slice, and consecutive rings fill neighbouring boxes. Each hop goes to
    another core of the chip or to a neighbouring chip; if the box has no closed path of such hops, some hops go two
    chips far. If `ranks` exceeds a slice, a ring is made of whole slices, with one hop to the next slice from each.
    """
    slices: dict[int, list[Any]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    grids = [_grid(number, slices[number]) for number in sorted(slices)]
    if all(len(grid) % ranks == 0 for grid in grids):
        return [ring for grid in grids for ring in _tiled(grid, ranks)]
    size = len(grids[0])
    if ranks % size or len(devices) % ranks or any(len(grid) != size for grid in grids):
        raise MeshError(
            f"a ring of {ranks} devices is neither a part of every slice nor made of whole slices of one size: the "
            f"slices have {', '.join(str(len(grid)) for grid in grids)} devices. Pass a ring size that divides each"
        )
    chained = [device for grid in grids for device in _tiled(grid, size)[0]]
    return [chained[start : start + ranks] for start in range(0, len(chained), ranks)]


def round_trip(box: Cell) -> list[Cell]:
    """A closed path that visits every cell of a box of chips once; the last axis of the box is the cores of a chip.

    A step goes to another core of the chip, or to any core of the next chip. If `closes(box)`, every hop is one step;
    otherwise some hops are two steps. If the chips alone have a closed path, the cores of a chip follow one another, so
    that links carry fewer hops. If only chips and cores together have one, the path goes out over one core of each chip
    and back over the other.
    """
    *chips, cores = box
    if _closes(chips):
        return [(*chip, core) for chip in _loop(chips) for core in range(cores)]
    return _loop(box)


def closes(box: Cell) -> bool:
    """Whether the box of chips and cores has a closed path in which every hop is one step."""
    return _closes(box[:-1]) or _closes(box)


def _closes(sizes: Sequence[int]) -> bool:
    """Whether a closed path of single steps visits each cell once.

    True for one or two cells, and for an even number of cells on two axes or more.
    """
    cells = math.prod(sizes)
    return cells <= 2 or (cells % 2 == 0 and sum(size > 1 for size in sizes) > 1)


def _loop(sizes: Sequence[int]) -> list[Cell]:
    cells = math.prod(sizes)
    if cells <= 2 or not _closes(sizes):
        path = _path(sizes)
        return path[::2] + path[1::2][::-1]
    # A path through all axes but the last forms, with the last axis, a grid of two axes that keeps neighbours.
    last = max(axis for axis, size in enumerate(sizes) if size > 1)
    rows, across = _path([*sizes[:last], *sizes[last + 1 :]]), range(sizes[last])
    if len(rows) % 2:
        return [(*rows[j][:last], i, *rows[j][last:]) for i, j in _closed_path(len(across), len(rows))]
    return [(*rows[i][:last], j, *rows[i][last:]) for i, j in _closed_path(len(rows), len(across))]


def _closed_path(even: int, other: int) -> list[tuple[int, int]]:
    """A closed path of single steps that visits every cell of a grid of `even` by `other` cells once.

    `even` is an even number, and `other` at least 2. The path goes down the first column, and back up in a zigzag
    through the other columns.
    """
    down = [(i, 0) for i in range(even)]
    sides = itertools.cycle((range(1, other), range(other - 1, 0, -1)))
    return down + [(i, j) for i, side in zip(reversed(range(even)), sides, strict=False) for j in side]


def _path(sizes: Sequence[int]) -> list[Cell]:
    """An open path: every cell once, each one step from the cell before."""
    if not sizes:
        return [()]
    sides = itertools.cycle((range(sizes[-1]), range(sizes[-1] - 1, -1, -1)))
    return [(*cell, i) for cell, side in zip(_path(sizes[:-1]), sides, strict=False) for i in side]


def _grid(number: int, devices: Sequence[Any]) -> dict[Cell, Any]:
    """The devices of a slice by cell, counted from the slice's corner; raises unless they fill a box."""
    cells = {(*device.coords, getattr(device, "core_on_chip", None) or 0): device for device in devices}
    least = [min(axis) for axis in zip(*cells, strict=True)]
    grid = {tuple(c - low for c, low in zip(cell, least, strict=True)): cells[cell] for cell in cells}
    *chips, cores = box = _box(grid)
    if not len(devices) == len(grid) == math.prod(box):
        spanned = "x".join(map(str, chips)) + (f" (times {cores} cores)" if cores > 1 else "")
        raise MeshError(
            f"the devices of slice {number} do not fill the {spanned} grid that they span. Pass devices that "
            f"do, or order them yourself: jax.sharding.Mesh(devices, axis_names)"
        )
    return grid


def _box(grid: dict[Cell, Any]) -> Cell:
    return tuple(max(axis) + 1 for axis in zip(*grid, strict=True))


def _tiled(grid: dict[Cell, Any], ranks: int) -> list[list[Any]]:
    """Splits one slice into rings: boxes of equal shape, each visited in the same order."""
    box = _box(grid)
    tile = _tile(box, ranks)
    corners = round_trip(tuple(size // side for size, side in zip(box, tile, strict=True)))
    trip = round_trip(tile)
    return [
        [grid[tuple(c * side + i for c, side, i in zip(corner, tile, cell, strict=True))] for cell in trip]
        for corner in corners
    ]


def _tile(box: Cell, ranks: int) -> Cell:
    """The best box of `ranks` devices that tiles the grid: shortest hops first, then whole chips, then compactness.

    If `ranks` divides the number of devices, there is such a box.
    """
    sides = [[n for n in range(1, size + 1) if size % n == 0] for size in box]
    fitting = [tile for tile in itertools.product(*sides) if math.prod(tile) == ranks]
    return min(fitting, key=lambda tile: (not closes(tile), -tile[-1], sum(tile[:-1]), tile))
