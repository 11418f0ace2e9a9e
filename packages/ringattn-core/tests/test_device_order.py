# SPDX-License-Identifier: Apache-2.0
"""On every grid of TPUs each hop of a ring is short, also the last; CPUs and GPUs keep their order."""

import dataclasses
import itertools
import math
import random
from typing import Any

import jax
import pytest
from ringattn_core import ring_mesh
from ringattn_core.errors import MeshError
from ringattn_core.placement import device_order

PLANES = list(itertools.product(range(1, 7), repeat=2))
SOLIDS = list(itertools.product(range(1, 5), repeat=3))
GRIDS = [(*grid, cores) for grid in (*PLANES, *SOLIDS) for cores in (1, 2)]


@dataclasses.dataclass(frozen=True)
class Device:
    """The attributes of a TPU that say where it is."""

    coords: tuple[int, ...]
    core_on_chip: int = 0
    slice_index: int | None = None
    platform: str = "tpu"


def devices(*box: int, cores: int = 1, slices: int = 1, corner: int = 0) -> list[Device]:
    """All devices of some slices, in the order in which JAX lists them: the first axis fastest."""
    cells = [cell[::-1] for cell in itertools.product(*map(range, box[::-1]))]
    return [
        Device(tuple(c + corner for c in cell), core, number if slices > 1 else None)
        for number in range(slices)
        for cell in cells
        for core in range(cores)
    ]


def distance(a: Device, b: Device) -> int:
    """The number of links between two devices of a slice; 0 between cores of one chip."""
    assert a.slice_index == b.slice_index
    return sum(abs(i - j) for i, j in zip(a.coords, b.coords, strict=True))


def hops(ring: Any) -> list[int]:
    return [distance(a, b) for a, b in zip(ring, [*ring[1:], ring[0]], strict=True)]


def has_a_cycle(box: tuple[int, ...]) -> bool:
    """Whether a search finds a closed path. Neighbours of a core are on its chip or on a neighbouring chip."""
    everything = list(itertools.product(*map(range, box)))
    near = {
        a: [b for b in everything if a != b and sum(abs(i - j) for i, j in zip(a[:-1], b[:-1], strict=True)) <= 1]
        for a in everything
    }

    def extended(path: list[tuple[int, ...]], visited: set[tuple[int, ...]]) -> bool:
        if len(path) == len(everything):
            return everything[0] in near[path[-1]]
        onward = (cell for cell in near[path[-1]] if cell not in visited)
        return any(extended([*path, cell], visited | {cell}) for cell in onward)

    return math.prod(box) <= 2 or extended(everything[:1], set(everything[:1]))


@pytest.mark.parametrize("cores", [1, 2])
def test_a_ring_of_the_whole_grid_is_made_of_neighbour_hops_wherever_that_is_possible(cores: int):
    for box in (grid for grid in GRIDS if grid[-1] == cores):
        ring = ring_mesh(devices(*box[:-1], cores=cores)).devices
        assert len(set(ring)) == math.prod(box)
        assert max(hops(list(ring)), default=0) <= (1 if device_order.closes(box) else 2), box


def test_two_links_are_used_only_where_no_search_finds_a_way_with_one():
    for box in (grid for grid in GRIDS if math.prod(grid) <= 12):
        assert device_order.closes(box) == has_a_cycle(box), box


@pytest.mark.parametrize("box", [(8, 8, 1), (4, 8, 2), (16, 16, 1), (2, 4, 12), (4, 4, 4), (3, 4, 1)], ids=str)
@pytest.mark.parametrize("cores", [1, 2])
def test_every_ring_size_tiles_the_grid_with_boxes_of_the_shortest_hops(box: tuple[int, ...], cores: int):
    everything = devices(*box, cores=cores)
    sides = [[n for n in range(1, size + 1) if size % n == 0] for size in (*box, cores)]
    shapes = list(itertools.product(*sides))
    for ranks in (n for n in range(1, len(everything) + 1) if len(everything) % n == 0):
        mesh = ring_mesh(everything, axis_sizes={"data": len(everything) // ranks, "sp": ranks})
        assert mesh.axis_names == ("data", "sp") and set(mesh.devices.flat) == set(everything)
        short = any(device_order.closes(shape) for shape in shapes if math.prod(shape) == ranks)
        assert {max(hops(list(ring))) for ring in mesh.devices} <= ({0, 1} if short else {2})


def test_the_other_axis_goes_from_box_to_neighbouring_box():
    mesh = ring_mesh(devices(8, 8), axis_sizes={"data": 16, "sp": 4})
    for number in range(4):
        assert hops(list(mesh.devices[:, number])) == [2] * 16


def test_where_the_devices_were_listed_and_where_the_grid_begins_changes_nothing():
    everything = devices(4, 8, corner=5)
    shuffled = random.Random(0).sample(everything, len(everything))
    assert (ring_mesh(shuffled).devices == ring_mesh(everything).devices).all()
    assert hops(list(ring_mesh(shuffled).devices)) == [1] * 32


def test_a_ring_stays_within_a_slice_or_is_made_of_whole_ones():
    everything = devices(2, 4, slices=4)
    within = ring_mesh(everything, axis_sizes={"data": 4, "sp": 8}).devices
    assert [{device.slice_index for device in ring} for ring in within] == [{0}, {1}, {2}, {3}]
    across = ring_mesh(everything, axis_sizes={"data": 2, "sp": 16}).devices
    for ring in across:
        leaving = sum(a.slice_index != b.slice_index for a, b in itertools.pairwise([*ring, ring[0]]))
        assert leaving == 2


def test_axes_come_in_the_order_given_and_several_may_count_the_rings():
    everything = devices(4, 4)
    mesh = ring_mesh(everything, "ring", {"dp": 2, "ring": 4, "tp": 2})
    assert mesh.shape == {"dp": 2, "ring": 4, "tp": 2}
    assert all(hops(list(mesh.devices[i, :, j])) == [1] * 4 for i in range(2) for j in range(2))


@pytest.mark.parametrize("sizes", [None, {"data": 2, "sp": 2}], ids=["one ring", "two rings"])
def test_gpus_keep_their_order_although_they_have_coordinates(sizes: dict[str, int] | None):
    """JAX gives the GPUs of a host the coordinates (0, 0, 0), (1, 0, 0) and so on."""
    gpus = [dataclasses.replace(device, platform="gpu") for device in devices(4, 1, 1)]
    assert list(ring_mesh(gpus, axis_sizes=sizes).devices.flat) == gpus


def test_devices_without_coordinates_keep_their_order():
    assert list(ring_mesh().devices) == jax.devices() and ring_mesh().axis_names == ("sp",)
    by_four = ring_mesh(jax.devices(), axis_sizes={"data": 2, "sp": 4}).devices
    assert by_four.tolist() == [jax.devices()[:4], jax.devices()[4:]]


REFUSED = {
    "no size for the ring": (devices(4), dict(axis_sizes={"data": 4}), "axis_name='sp' is not in axis_sizes"),
    "another number of devices": (devices(4), dict(axis_sizes={"sp": 8}), "do not fit 4 devices"),
    "sizes in a list": (devices(4), dict(axis_sizes=[4]), "names no axes"),
    "one device twice, without coordinates": (jax.devices() * 2, {}, "holds one device twice"),
    "a grid with a hole": (devices(4, 4)[:-1], {}, "do not fill the 4x4 grid"),
    "a slice and a half": (devices(2, 4, slices=3), dict(axis_sizes={"data": 2, "sp": 12}), "nor made of whole slices"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_ring_is_refused(name: str):
    given, options, message = REFUSED[name]
    with pytest.raises(MeshError, match=message):
        ring_mesh(given, **options)
