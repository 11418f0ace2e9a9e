# SPDX-License-Identifier: Apache-2.0
"""Promises of the configuration: compared by value, converted without loss, and unknown fields are refused."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from ringattn_core.config import BwdParams, FwdParams, RingAttentionConfig
from ringattn_core.errors import InputError

FULL = RingAttentionConfig(
    {"q_blocksize": 128, "num_warps": 4, "extra": {"order": [1, 2]}}, BwdParams(kv_blocksize=64), backend="triton"
)


@dataclasses.dataclass
class ForeignParams:
    """A dataclass with the fields of `ejkernel`'s parameters."""

    blocksize_m: int | None = None
    blocksize_n: int | None = None
    q_blocksize: int | None = None
    num_stages: int | None = None


@pytest.mark.parametrize("params", [FwdParams, BwdParams])
class TestParams:
    def test_equal_values_are_equal_and_hash_equal(self, params: Any) -> None:
        a = params(q_blocksize=128, extra={"b": 1, "a": 2})
        b = params(q_blocksize=np.int64(128), extra={"a": 2, "b": 1})
        assert a == b and hash(a) == hash(b)

    @pytest.mark.parametrize(
        ("field", "value"), [("q_blocksize", 0), ("kv_blocksize", 1.5), ("num_warps", "4"), ("num_stages", True)]
    )
    def test_a_size_that_is_not_a_positive_integer_is_refused_by_name(
        self, params: Any, field: str, value: Any
    ) -> None:
        with pytest.raises(InputError, match=f"{field}: got {value!r}, not a positive integer. .*Leave it None"):
            params(**{field: value})

    @pytest.mark.parametrize("extra", [3, {1: 2, "order": 3}, {"table": {1: 2}}])
    def test_values_without_names_and_unhashable_ones_are_refused(self, params: Any, extra: Any) -> None:
        with pytest.raises(InputError, match=r"extra: got .*\. Pass a dict of named values"):
            params(extra=extra)

    def test_a_misspelt_key_is_refused_with_the_nearest_name(self, params: Any) -> None:
        with pytest.raises(InputError, match=r"unknown field 'q_blocksze' \(did you mean 'q_blocksize'\?\).*extra=\{"):
            params.of({"q_blocksze": 8})

    def test_a_foreign_dataclass_keeps_what_it_sets_and_drops_its_nones(self, params: Any) -> None:
        foreign = ForeignParams(blocksize_n=32, blocksize_m=64, q_blocksize=128)
        assert params.of(foreign) == params(q_blocksize=128, extra=(("blocksize_m", 64), ("blocksize_n", 32)))
        assert params.of(ForeignParams(blocksize_m=64)) == params(extra=(("blocksize_m", 64),))

    @pytest.mark.parametrize("value", [128, ForeignParams])
    def test_anything_else_is_refused(self, params: Any, value: Any) -> None:
        with pytest.raises(InputError, match=f"Pass a {params.__name__}, a dict of its fields, or None"):
            params.of(value)


def test_parameters_of_the_backward_pass_are_none_of_the_forward_pass() -> None:
    with pytest.raises(InputError, match="FwdParams: got BwdParams"):
        FwdParams.of(BwdParams())


class TestRingAttentionConfig:
    def test_it_round_trips_through_json_and_equal_values_hash_equal(self) -> None:
        again = RingAttentionConfig.from_json(FULL.to_json())
        assert again == FULL and hash(again) == hash(FULL)
        assert RingAttentionConfig() == RingAttentionConfig(FwdParams(), {}, "auto", "any")

    @pytest.mark.parametrize(("text", "fact"), [("{", "not JSON"), ("[1]", "got list")])
    def test_text_that_is_no_configuration_is_refused(self, text: str, fact: str) -> None:
        with pytest.raises(InputError, match=fact):
            RingAttentionConfig.from_json(text)

    @pytest.mark.parametrize(
        ("given", "name"),
        [({"backend": "auto"}, None), ({"backend": "xla"}, "xla"), ({"platform": "pallas", "backend": "gpu"}, "tpu")],
    )
    def test_it_names_the_backend_in_either_vocabulary(self, given: dict[str, str], name: str | None) -> None:
        assert RingAttentionConfig(**given).backend_name == name

    def test_two_names_that_disagree_are_refused(self) -> None:
        with pytest.raises(InputError, match="platform='xla' and backend='triton' name two backends"):
            RingAttentionConfig(platform="xla", backend="triton")

    @pytest.mark.parametrize("value", ["", None])
    def test_an_invalid_name_is_refused(self, value: Any) -> None:
        with pytest.raises(InputError, match=rf"RingAttentionConfig\.platform: got {value!r}"):
            RingAttentionConfig(platform=value)
