# SPDX-License-Identifier: Apache-2.0
"""Promises of measured rates: what tuning has timed takes the place of the constants, of the right kernels only."""

from pathlib import Path
from typing import Any

import pytest
from ringattn_core.backends import discovery
from ringattn_core.config import BwdParams, FwdParams, RingAttentionConfig
from ringattn_core.strategies import devices, measured
from ringattn_core.tuning import cache
from ringattn_core.tuning.problem import Problem

H200 = devices.DEVICES["h200"]
CHOSEN = RingAttentionConfig(FwdParams(q_blocksize=64), BwdParams(q_blocksize=32))


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("RINGATTN_CACHE_DIR", str(tmp_path))
    measured._rates.cache_clear()
    yield
    measured._rates.cache_clear()


def tuned(seconds: tuple[float, float] = (1e-3, 4e-3), **changes: Any) -> None:
    """Stores what tuning of a causal call on one device would."""
    given: dict[str, Any] = {
        "backend": "fast", "batch": 2, "q_length": 4096, "kv_length": 4096, "heads": 8, "kv_heads": 2,
        "head_dim": 128, "value_dim": 128, "dtype": "bfloat16", "platform": "cuda", "device": "NVIDIA H200",
        "versions": (), "causal": True, "options": (("layout", "contiguous"),),
    }  # fmt: skip
    slow = {"part": "forward", "params": FwdParams(q_blocksize=16).to_dict(), "seconds": 1e-9}
    trials = [
        slow,
        {"part": "forward", "params": CHOSEN.fwd_params.to_dict(), "seconds": seconds[0]},
        {"part": "backward", "params": CHOSEN.bwd_params.to_dict(), "seconds": seconds[1]},
    ]
    assert cache.write(Problem(**{**given, **changes}), CHOSEN, trials) is not None


def rates(backend: str | None = "fast", kind: str = "NVIDIA H200") -> devices.Device:
    return measured.with_measured(H200, kind, backend)


def test_without_tuning_the_constants_hold() -> None:
    assert rates() is H200
    tuned()
    measured._rates.cache_clear()
    assert rates(None) is H200 and rates("other") is H200 and rates(kind="NVIDIA H100 80GB HBM3") is H200


def test_the_rate_is_the_operations_over_the_time_of_the_chosen_parameters() -> None:
    tuned()
    found = rates()
    pairs = 2 * 8 * 4096**2 / 2
    forward, backward = found.rates[128]
    assert forward == pytest.approx(pairs * 4 * 128 / 1e-3, rel=0.01)
    assert backward == pytest.approx(pairs * 10 * 128 / 4e-3, rel=0.01)
    assert found.rates[64] == H200.rates[64] and found.float32 == H200.float32
    assert "tuning measured here" in found.source


def test_a_trial_of_a_ring_counts_the_hops_that_it_ran() -> None:
    tuned(ranks=8, causal=False)
    pairs = 4 * 2 * 8 * 4096**2
    assert rates().rates[128][0] == pytest.approx(pairs * 4 * 128 / 1e-3)


def test_the_best_of_several_counts_and_other_dtypes_apart() -> None:
    tuned()
    tuned((0.5e-3, 8e-3), batch=1)
    tuned((2e-3, 8e-3), dtype="float32")
    found = rates()
    assert found.rates[128][0] == pytest.approx(2 * 8 * 4096**2 / 2 * 512 / 1e-3, rel=0.01)
    assert found.float32[0] == pytest.approx(found.rates[128][0] / 2)


@pytest.mark.parametrize("option", ["q_segment_ids", "attention_mask", "bias", "mask_builder", "dropout_prob"])
def test_calls_whose_pairs_or_work_are_not_known_do_not_count(option: str) -> None:
    tuned(options=(("layout", "contiguous"), (option, True)))
    assert rates() is H200


def test_the_policy_off_reads_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned()
    monkeypatch.setenv("RINGATTN_AUTOTUNE", "off")
    assert rates() is H200


def test_clearing_the_registry_reads_the_cache_again() -> None:
    assert rates() is H200
    tuned()
    assert rates() is H200
    for forget in discovery.on_clear:
        forget()
    assert rates() is not H200
