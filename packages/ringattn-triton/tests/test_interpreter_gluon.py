# SPDX-License-Identifier: Apache-2.0
"""The interpreter runs the partitions, barriers and fetches of Gluon as a GPU may, and refuses what hangs there."""

import threading
import time

import ml_dtypes
import numpy as np
import pytest
from ringattn_testing.triton import small_gluon_kernels as kernels
from ringattn_testing.triton.interpreting import interpret, some

ROWS, TILE, DIM = kernels.ROWS.value, kernels.TILE.value, kernels.DIM.value
HALVES = (np.float16, ml_dtypes.bfloat16)


def operands(tiles, dtype=np.float16, rows=None):
    return some(dtype, (ROWS, DIM)), some(dtype, (rows or tiles * TILE, DIM), seed=1)


def products(a, b, tiles, places, fault=None):
    constants = {"B_ROWS": len(b), "TILES": tiles, "PLACES": places, "FAULT": fault}
    (out,) = interpret(kernels.products, [a, b], [((tiles, ROWS, TILE), np.float32)], **constants)
    return out


def expected(a, b, tiles):
    """The product with each tile, of zeros past the end."""
    whole = np.zeros((tiles * TILE, DIM))
    whole[: len(b)] = b
    return np.einsum("rd,tcd->trc", a.astype(np.float64), whole.reshape(tiles, TILE, DIM))


@pytest.fixture(autouse=True)
def nobody_is_left():
    """A partition that goes on after its program would touch what is no longer there."""
    before = threading.active_count()
    yield
    assert threading.active_count() == before


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("tiles", "places"), [(7, 1), (11, 3), (2, 4)])
def test_tiles_that_pass_through_few_places_are_multiplied_in_their_order(dtype, tiles, places):
    a, b = operands(tiles, dtype)
    np.testing.assert_allclose(products(a, b, tiles, places), expected(a, b, tiles), rtol=0, atol=2e-3)


def test_a_tile_that_reaches_past_the_end_is_zero_there_and_its_bytes_count():
    a, b = operands(4, rows=2 * TILE + 5)
    out = products(a, b, 4, 2)
    np.testing.assert_allclose(out, expected(a, b, 4), rtol=0, atol=2e-3)
    assert not out[2, :, 5:].any() and not out[3].any()


def sums(row, fault=None):
    before = np.ones((TILE, DIM), np.float32)
    (out,) = interpret(
        kernels.added, [before], [((TILE, DIM), np.float32)], grid=(4,), aliases={0: 0}, ROW=row, FAULT=fault
    )
    return out


@pytest.mark.parametrize("row", [0, 8, -8])
def test_programs_add_their_tiles_to_what_is_there_and_nothing_past_the_end(row):
    added = np.zeros((TILE, DIM))
    added[max(row, 0) : TILE + min(row, 0)] = 4 * (1 + 2)
    np.testing.assert_array_equal(sums(row), 1 + added)


def test_a_tile_that_is_overwritten_before_it_is_read_adds_the_next_one():
    np.testing.assert_array_equal(sums(0, "given up too early"), 1 + 4 * (2 + 2))


def test_a_program_that_ends_before_its_tiles_are_added_is_an_error():
    with pytest.raises(RuntimeError, match="ends before what it adds to memory has arrived there"):
        sums(0, "ends unread")


def test_what_nobody_wrote_to_shared_memory_is_nan_or_the_largest_integer():
    floats, integers = interpret(kernels.unwritten, [], [((TILE,), np.float32), ((TILE,), np.int32)])
    assert np.isnan(floats).all() and (integers == np.iinfo(np.int32).max).all()


def test_a_place_that_is_given_up_too_early_holds_the_next_tile():
    a, b = operands(6)
    right = expected(a, b, 6)
    for _ in range(5):
        out = products(a, b, 6, 1, "given up too early")
        np.testing.assert_allclose(out, right[[1, 2, 3, 4, 5, 5]], rtol=0, atol=2e-3)


def test_a_place_that_is_read_too_early_holds_nothing():
    a, b = operands(3)
    for _ in range(5):
        assert np.isnan(products(a, b, 3, 4, "read too early")).all()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("never gives up", "waits for ever: its partitions all wait for each other"),
        ("too few bytes", "waits for ever: its partitions all wait for each other"),
        ("never fetches", "waits for ever: its partitions wait for one that has ended"),
        ("never announces", "ends before its fetches do|waits for ever"),
        ("never waits", "arrives more often at a barrier than|waits for ever"),
        ("a fetch too many", "ends before its fetches do: nobody waits for their bytes"),
        ("ends unfinished", "ends before its products do"),
        ("stored unfinished", "a product for which it has not waited"),
        ("scaled unfinished", "a product for which it has not waited"),
        ("no fence", "multiplies what was put into shared memory, with no fence between"),
        ("younger product", "a product for which it has not waited"),
        ("waits anywhere", "uses a barrier that was not initialised"),
        ("arrives twice", "arrives more often at a barrier than the 1 times that it counts"),
        ("place", "takes place 2 of 2 in shared memory"),
        ("parity", "waits for a phase of parity 3; parities are 0 and 1"),
        ("stride", r"strides \[60, 1\]: the last is to be 1, the others multiples of 16 bytes"),
        ("base", "from element 4 on, no multiple of 16 bytes"),
    ],
)
def test_a_broken_rule_is_an_error_in_seconds(fault, message):
    a, b = operands(7)
    begun = time.monotonic()
    with pytest.raises((RuntimeError, TypeError, ValueError, IndexError), match=message):
        products(a, b, 7, 2, fault)
    assert time.monotonic() - begun < 5


def passed_on(fault=None):
    return interpret(kernels.passed_on, [], [((9,), np.int32)], COUNT=9, FAULT=fault)[0]


def test_hardware_barriers_hand_numbers_on():
    np.testing.assert_array_equal(passed_on(), np.arange(9))


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("never waits", "arrives more often at a barrier than the 160 times that it counts"),
        ("never empties", "waits for ever: its partitions all wait for each other"),
        ("a seventeenth barrier", "names hardware barrier 16, and there are 16, from 0 on"),
        ("other threads", "has a hardware barrier for (160 threads and for 192|192 threads and for 160)"),
    ],
)
def test_a_hardware_barrier_that_is_used_wrongly_is_an_error(fault, message):
    with pytest.raises(RuntimeError, match=message):
        passed_on(fault)


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_program_that_waits_for_a_later_program_is_an_error(partitions):
    def in_turn(*turns):
        operands, outputs = [np.array(turns, np.int32), np.zeros(1, np.int32)], [((1,), np.int32)]
        options = dict(grid=(len(turns),), aliases={1: 0}, PARTITIONS=partitions)
        return interpret(kernels.in_turn, operands, outputs, **options)[0]

    assert in_turn(0, partitions, partitions) == 3 * partitions
    with pytest.raises(RuntimeError, match=r"program .1, 0, 0. waits for ever: no program before it has written"):
        in_turn(0, 2 * partitions, partitions)


def test_an_error_of_one_launch_leaves_nothing_to_the_next():
    a, b = operands(3)
    for fault in ("never gives up", "never fetches", "ends unfinished", "stored unfinished", "a fetch too many"):
        with pytest.raises((RuntimeError, TypeError)):
            products(a, b, 3, 1, fault)
        np.testing.assert_allclose(products(a, b, 3, 1), expected(a, b, 3), rtol=0, atol=2e-3)
