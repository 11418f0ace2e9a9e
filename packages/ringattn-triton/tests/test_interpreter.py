# SPDX-License-Identifier: Apache-2.0
"""The interpreter computes what a compiled kernel would, and refuses what a GPU would silently get wrong."""

import numpy as np
import pytest
from ringattn_testing.triton import small_kernels
from ringattn_testing.triton.interpreting import interpret, some

# What 64 terms summed in float32, in whatever order this processor's BLAS takes them, stay far below.
FLOAT32_SUM = 2**-20


def error_of_product(got, a, b):
    """The largest error of ``a @ b.T``, in parts of what the sum of its terms without their signs is."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (np.abs(got - a @ b.T) / (np.abs(a) @ np.abs(b).T)).max()


def test_a_dot_of_float32_is_tf32_unless_asked_to_be_exact():
    a, b = some(np.float32, (32, 64)), some(np.float32, (16, 64), seed=1)
    errors = {}
    for precision in (None, "tf32", "tf32x3", "ieee"):
        constants = {"M": 32, "N": 16, "K": 64, "PRECISION": precision}
        (got,) = interpret(small_kernels.product, [a, b], [((32, 16), np.float32)], **constants)
        errors[precision] = error_of_product(got, a, b)
    assert errors["ieee"] < FLOAT32_SUM and errors["tf32x3"] < FLOAT32_SUM
    assert 10 * FLOAT32_SUM < errors["tf32"] < 2**-9 and errors[None] == errors["tf32"]


def test_tf32_cuts_operands_as_tensor_cores_do():
    a, b = np.abs(some(np.float32, (32, 64))), np.abs(some(np.float32, (16, 64), seed=1))
    constants = {"M": 32, "N": 16, "K": 64, "PRECISION": "tf32"}
    (got,) = interpret(small_kernels.product, [a, b], [((32, 16), np.float32)], **constants)
    exact = a.astype(np.float64) @ b.T.astype(np.float64)
    lost = (exact - got) / exact
    assert (lost > 0).all() and 2**-11 < lost.mean() < 2**-10


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("load past the end", r"program \(3, 0, 0\) loads element 127 of operand 'X' of kernel faulty, which has 100"),
        ("load before the start", r"program \(0, 0, 0\) loads element -32 of operand 'X'"),
        ("store past the end", r"program \(3, 0, 0\) stores element 127 of operand 'OUT' of kernel faulty"),
        ("two programs write", r"\(1, 0, 0\) writes to elements of operand 'OUT' .* another program has written"),
        ("write to an operand", r"writes to operand 'X' of kernel faulty, which is not an output"),
    ],
)
def test_an_access_that_breaks_a_rule_of_memory_names_kernel_program_and_operand(fault, message):
    x = some(np.float32, 100)
    with pytest.raises((IndexError, RuntimeError), match=message):
        interpret(small_kernels.faulty, [x, x], [(x.shape, np.float32)], grid=(4,), N=100, TILE=32, FAULT=fault)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("another program's part", "shares its memory"),
        ("read after write", "reads operand 'TOTAL' .* where a program has written the output that shares its memory"),
    ],
)
def test_an_alias_is_read_and_written_by_one_program_and_in_that_order(fault, message):
    x = some(np.float32, 100)
    constants = {"N": 100, "TILE": 32, "FAULT": fault}
    with pytest.raises(RuntimeError, match=message):
        interpret(small_kernels.faulty, [x, x], [(x.shape, np.float32)], grid=(4,), aliases={1: 0}, **constants)
    interpret(small_kernels.faulty, [x, x], [(x.shape, np.float32)], grid=(4,), **constants)


def test_what_nobody_wrote_is_nan():
    x = some(np.float32, 100)
    constants = {"N": 100, "TILE": 32, "FAULT": "an element left out"}
    (got,) = interpret(small_kernels.faulty, [x, x], [(x.shape, np.float32)], grid=(4,), **constants)
    np.testing.assert_array_equal(np.isnan(got), np.arange(100) == 99)


def test_what_a_mask_left_out_is_nan():
    x = some(np.float32, 100)
    constants = {"N": 100, "TILE": 32, "FAULT": "use of what a mask left out"}
    (got,) = interpret(small_kernels.faulty, [x, x], [(x.shape, np.float32)], grid=(4,), **constants)
    np.testing.assert_array_equal(np.isnan(got), np.arange(100) >= 96)
