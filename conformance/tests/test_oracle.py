# SPDX-License-Identifier: Apache-2.0
"""The oracle itself is right: by hand, by finite differences, and by published vectors."""

import dataclasses
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from ringattn_conformance import oracle
from ringattn_conformance.cases import CASES, Case
from ringattn_conformance.oracle import Problem, attend


def _tiny(**options) -> Problem:
    """One head of size 1, keys 0, so that every score is 0 before bias: two queries, three keys with values 1, 2, 4."""
    q = np.ones((1, 2, 1, 1))
    k = np.zeros((1, 3, 1, 1))
    v = np.array([1.0, 2.0, 4.0]).reshape(1, 3, 1, 1)
    return Problem(q, k, v, **options)


def _rows(problem: Problem) -> list[float]:
    return attend(problem).out.reshape(-1).tolist()


def test_equal_scores_average_the_values():
    assert _rows(_tiny()) == pytest.approx([7 / 3, 7 / 3])
    assert attend(_tiny()).lse.reshape(-1).tolist() == pytest.approx([np.log(3)] * 2)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"causal": True}, [1, 1.5]),
        ({"window": 0}, [1, 2]),
        ({"window": (0, 1)}, [1.5, 3]),
        ({"window": (1, 0)}, [1, 1.5]),
        ({"window": (None, 0)}, [1, 1.5]),
        ({"window": (0, None)}, [7 / 3, 3]),
        ({"chunk": 1}, [1, 2]),
        ({"chunk": 2}, [1, 1.5]),
        ({"causal": True, "q_positions": np.array([2, -1])}, [7 / 3, 0]),
        ({"chunk": 2, "q_positions": np.array([-1, 3]), "kv_positions": np.array([-2, -1, 2])}, [1.5, 4]),
        ({"kv_range": (1, 2)}, [3, 3]),
        ({"kv_range": (2, 1)}, [0, 0]),
        ({"kv_range": (-(2**31), np.array([0, 2**31 - 1]))}, [1, 7 / 3]),
        ({"kv_range": (np.array([[1, 1]]), np.array([[1, 0]]))}, [2, 0]),
        ({"kv_range": (np.array([[[0, 2]]]), 2), "causal": True}, [1, 0]),
        ({"kv_range": (-4, np.array([-3, 9])), "kv_positions": np.array([-4, -3, 9])}, [1.5, 7 / 3]),
        ({"selected": np.array([0, 2, 2, -1]).reshape(1, 2, 1, 2)}, [2.5, 4]),
        ({"selected": np.array([1, -1]).reshape(1, 2, 1, 1), "selected_size": 2}, [4, 0]),
        ({"selected": np.array([5, 0]).reshape(1, 2, 1, 1), "causal": True, "selected_size": 2}, [0, 1.5]),
        ({"q_segments": np.array([[0, -1]]), "kv_segments": np.array([[0, -1, 0]])}, [2.5, 0]),
        *(
            ({"bias": np.array([[[[0, 0, low], [low] * 3]]])}, [1.5, 0])
            for low in (-2e5, -1e9, np.finfo(np.float32).min, -np.inf)
        ),
        ({"bias": np.array([[[[0, 0, -9e4], [-9e4] * 3]]])}, [1.5, 7 / 3]),
        ({"seen": np.array([[True, False, True], [False, False, False]])}, [2.5, 0]),
        ({"bias": np.array([0, -np.inf, 0]).reshape(1, 1, 1, 3)}, [2.5, 2.5]),
        ({"bias": np.log(np.array([2.0, 1, 1])).reshape(1, 1, 1, 3)}, [2, 2]),
        ({"sinks": np.zeros((1, 1))}, [7 / 4, 7 / 4]),
        ({"sinks": np.zeros(2)}, [7 / 5, 7 / 5]),
        ({"sinks": np.array([0.0])}, [7 / 4, 7 / 4]),
        ({"sinks": np.array([-np.inf])}, [7 / 3, 7 / 3]),
        ({"slopes": np.log(np.array([2.0]))}, [(1 + 1 + 1) / 1.75, (0.5 + 2 + 2) / 2]),
    ],
)
def test_hand_computed_rows(options, expected):
    assert _rows(_tiny(**options)) == pytest.approx(expected)


def test_a_range_of_two_axes_is_by_row_of_the_batch_and_one_of_three_by_row_and_head():
    q, k, v = np.ones((2, 2, 3, 1)), np.zeros((2, 4, 3, 1)), np.ones((2, 4, 3, 1))
    by_row, by_head = np.array([[0, 1], [2, 3]]), np.arange(3)[None, :, None]
    seen = oracle.visible(Problem(q, k, v, kv_range=(by_head, by_row)))
    assert seen.sum(-1).tolist() == [[[1, 2], [0, 1], [0, 0]], [[3, 4], [2, 3], [1, 2]]]
    assert oracle.visible(Problem(q, k, v, kv_range=(0, np.array([0, 3])))).sum(-1).tolist() == [[[1, 4]] * 3] * 2


def test_chosen_keys_take_memory_for_the_keys_and_not_for_their_square():
    keys = 4000
    every = np.arange(keys).reshape(1, 1, 1, keys)
    problem = Problem(np.ones((1, 1, 1, 1)), np.zeros((1, keys, 1, 1)), np.ones((1, keys, 1, 1)), selected=every)
    tracemalloc.start()
    seen = oracle.visible(problem)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert seen.all() and most < 100 * keys


def test_a_row_that_sees_nothing_is_zero_and_its_lse_is_that_of_its_sinks():
    nothing = np.zeros((2, 3), bool)
    alone = attend(_tiny(seen=nothing))
    assert alone.out.tolist() == np.zeros((1, 2, 1, 1)).tolist()
    assert np.isneginf(alone.lse).all()
    with_sinks = attend(_tiny(seen=nothing, sinks=np.array([[1.0, 2.0]])), np.ones((1, 2, 1, 1)), np.ones((1, 1, 2)))
    assert with_sinks.lse == pytest.approx(np.log(np.e + np.e**2))
    share = 1 / (1 + np.e)
    assert with_sinks.gradients["dsinks"] == pytest.approx(2 * np.array([[share, 1 - share]]))
    assert all(not with_sinks.gradients[name].any() for name in ("dq", "dk", "dv"))


ONES, PI = 2**32 - 1, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344, 0xA4093822, 0x299F31D0)


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ((ONES,) * 4, (ONES, ONES), "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (PI[:4], PI[4:], "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)
def test_philox_4x32_gives_the_published_vectors(counter, key, words):
    assert " ".join(f"{word:08x}" for word in oracle.philox_4x32(counter, key)) == words


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0), 0, "257a3673 cd26be2a"),
        ((ONES, ONES), ONES, "ab302c4d 3dc9d239"),
        (PI[:2], PI[2], "bedbbe6b e4c770b3"),
    ],
)
def test_philox_2x32_gives_the_published_vectors(counter, key, words):
    found = oracle.philox_2x32(*(np.asarray(x) for x in counter), key)
    assert " ".join(f"{int(word):08x}" for word in found) == words


def test_dropout_keeps_the_halves_at_or_above_the_threshold_by_global_index():
    problem = Problem(np.ones((2, 30, 2, 1)), np.ones((2, 50, 2, 1)), np.ones((2, 50, 2, 1)), dropout=0.3, seed=7)
    keep = oracle.kept(problem)
    assert keep.shape == (2, 2, 30, 50)
    key = oracle.philox_4x32((1, 0, 0, 0), (7, 0))[0]
    words = oracle.philox_2x32(np.asarray(8 + 3), np.asarray(16 + 5), key)
    halves = [int(half) for word in words for half in (word % 2**16, word // 2**16)]
    found = [bool(keep[0, 1, i, j]) for i in (19, 27) for j in (37, 45)]
    assert found == [half >= int(0.3 * 2**16) for half in halves]
    assert 0.6 < keep.mean() < 0.8
    assert oracle.keep_probability(problem) == 1 - int(0.3 * 2**16) / 2**16


def test_the_layouts_hold_the_tokens_that_the_specification_names():
    assert oracle.order("zigzag", 2, 8).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert oracle.order("striped", 2, 8).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


_SLOW_TO_DIFFER = ("logits-1e4", "long")


@pytest.mark.parametrize(
    "case", [c for c in CASES if c.dtype == "float32" and not c.name.startswith(_SLOW_TO_DIFFER)], ids=lambda c: c.name
)
def test_gradients_agree_with_finite_differences(case: Case):
    inputs = case.inputs
    problem, dout, dlse = inputs.problem, inputs.dout, inputs.dlse
    answer = attend(problem, dout, dlse)
    rng = np.random.default_rng(1)
    fields = {"dq": "q", "dk": "k", "dv": "v", "dbias": "bias", "dsinks": "sinks", "dslopes": "slopes"}
    weight = np.zeros_like(answer.lse) if dlse is None else dlse
    finite = np.isfinite(answer.lse)

    def loss(point: Problem) -> float:
        there = attend(point)
        return float(np.sum(there.out * dout) + np.sum(np.where(finite, there.lse, 0) * weight))

    for name, gradient in answer.gradients.items():
        x = np.asarray(getattr(problem, fields[name]), np.float64)
        direction = rng.standard_normal(x.shape)
        # A step of a slope changes a score by the step times the distance.
        distances = problem.q_positions if name == "dslopes" and problem.q_positions is not None else 1.0
        farthest = np.abs(distances).max()
        step = 1e-6 / max(1.0, case.gain, farthest)
        ahead, behind = (
            loss(dataclasses.replace(problem, **{fields[name]: x + sign * step * direction})) for sign in (1, -1)
        )
        want = (ahead - behind) / (2 * step)
        got = float(np.sum(gradient * direction))
        assert got == pytest.approx(want, rel=2e-5, abs=2e-5 * case.gain), name


def test_the_oracle_imports_neither_jax_nor_core():
    code = (
        "import sys, ringattn_conformance.oracle;sys.exit(bool({'jax', 'jaxlib', 'ringattn_core'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
