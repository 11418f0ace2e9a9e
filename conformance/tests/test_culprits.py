# SPDX-License-Identifier: Apache-2.0
"""A failure names the option or the size without which the call is right."""

import dataclasses
from typing import Any

import pytest
from ringattn_conformance import comparison, culprits
from ringattn_conformance.cases import Case
from ringattn_conformance.ranks import Placed, Placement, place

CASE = Case("mixture", causal=True, soft_cap=2.0, slopes=1, head_dim=64, value_dim=64, dtype="bfloat16")


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets which cases the backend gets wrong; nothing runs."""

    def set_wrong(when: Any) -> None:
        monkeypatch.setattr(culprits, "searches", 0)
        monkeypatch.setattr(culprits, "run", lambda placed, gradients: {"wrong": when(placed)})

        def check(got: dict[str, Any], answer: Any, case: Case) -> None:
            if got["wrong"]:
                raise comparison.Wrong("wrong")

        monkeypatch.setattr(comparison, "check", check)

    return set_wrong


def lines(case: Case = CASE) -> str:
    return "\n".join(culprits.found(place(case, Placement(2), "xla"), True))


def test_of_several_options_the_one_that_matters_is_named(wrong: Any):
    wrong(lambda placed: placed.case.soft_cap)
    assert lines().startswith("right without soft_cap\n")


@pytest.mark.parametrize(
    ("when", "said"),
    [
        (lambda placed: placed.case.head_dim == 64, "right with head_dim=16 and value_dim=16\n"),
        (lambda placed: placed.case.dtype == "bfloat16", "right with dtype=float32\n"),
        (lambda placed: placed.placement.ring > 1, "right with one rank\n"),
        (lambda placed: placed.case.q_length == 48, "right with 80 queries and keys\n"),
    ],
)
def test_where_no_option_matters_the_size_is_named(wrong: Any, when: Any, said: str):
    wrong(when)
    assert "wrong also without any option\n" in lines()
    assert said in lines()


def test_an_option_and_a_size_together_are_both_named(wrong: Any):
    wrong(lambda placed: placed.case.causal and placed.case.head_dim == 64)
    assert "right without causal\nright with head_dim=16" in lines()


def test_all_sizes_are_told_even_of_failures_that_are_not_looked_into(wrong: Any):
    wrong(lambda placed: True)
    sizes = "sizes: bfloat16, batch 2, 48 queries, 48 keys, 2/2 heads of 64, values of 64"
    found = [lines() for _ in range(culprits.MOST + 1)]
    assert all(sizes in one for one in found)
    assert found[-1] == sizes
    assert "right" not in found[0]


def test_a_case_that_the_backend_cannot_call_is_no_right_case(wrong: Any, monkeypatch: pytest.MonkeyPatch):
    wrong(lambda placed: True)

    def refused(placed: Placed, gradients: bool) -> Any:
        raise ValueError

    monkeypatch.setattr(culprits, "run", refused)
    assert "right" not in lines(dataclasses.replace(CASE, batch=3))


def test_the_size_of_scores_and_what_is_beside_an_option_are_named(wrong: Any):
    wrong(lambda placed: placed.case.selected_size == 16)
    case = dataclasses.replace(CASE, q_length=160, kv_length=160, selected="scattered", selected_size=16, gain=60.0)
    found = lines(case)
    assert "right without selected\n" in found, "without the option its block size is at its default"
    assert "right with selected_size=1\n" in found
    wrong(lambda placed: placed.case.gain == 60.0)
    assert "right with gain=1.0\n" in lines(case)
