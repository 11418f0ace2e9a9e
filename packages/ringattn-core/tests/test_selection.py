# SPDX-License-Identifier: Apache-2.0
"""Promises of selection: a name is final, a sequence falls back in order, and every refusal says why."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import pytest
from ringattn_core import ring_attention
from ringattn_core.backends import discovery, selection
from ringattn_core.contract.backend import Backend
from ringattn_core.contract.features import Feature
from ringattn_core.errors import (
    BackendNotFoundError,
    BackendUnavailableError,
    InputError,
    NoBackendError,
    UnsupportedFeatureError,
)
from ringattn_testing.rings import warnings

CAUSAL, BIAS = frozenset({Feature.CAUSAL}), frozenset({Feature.BIAS})
ALL = frozenset(Feature)


class Kernel:
    def forward(self, block: Any, partial: Any) -> Any: ...

    def backward(self, block: Any, dout: Any, lse: Any, delta: Any, dq: Any) -> Any: ...


def no_device() -> str:
    return "no GPU is visible"


@contextlib.contextmanager
def installed(
    name: str,
    *platforms: str,
    priority: int = 0,
    lacks: tuple[Feature, ...] = (),
    reasons: dict[Feature, str] | None = None,
    available: bool = True,
) -> Iterator[None]:
    probe = None if available else f"{__name__}:no_device"
    descriptor = Backend(name, 1, platforms, ALL.difference(lacks), "gone:KERNEL", None, priority, probe, reasons or {})
    with discovery.registered(descriptor, Kernel()):
        yield


@pytest.fixture
def fast_and_safe(install: Any) -> Iterator[None]:
    """Backend `fast` for cuda, without BIAS ("soon"); `safe` with all, everywhere."""
    fast = installed("fast", "cuda", priority=10, lacks=(Feature.BIAS,), reasons={Feature.BIAS: "soon"})
    with fast, installed("safe", "cpu", "cuda", "tpu", priority=-10):
        yield


@pytest.fixture
def dead(install: Any) -> Iterator[None]:
    """Backend `dead`, with the highest priority for cuda, whose probe finds no device."""
    with installed("dead", "cuda", priority=99, available=False):
        yield


def chosen(backend: Any, required: frozenset[Feature] = CAUSAL, platform: str = "cuda") -> str:
    return selection.select(backend, required, platform).name


@pytest.mark.usefixtures("fast_and_safe")
class TestAName:
    def test_an_unsupported_feature_is_refused_and_lists_backends_that_support_it(self) -> None:
        with pytest.raises(UnsupportedFeatureError, match=r"BIAS \(not declared: soon\)") as caught:
            chosen("fast", BIAS | CAUSAL)
        assert (caught.value.feature, caught.value.others) == ("BIAS", ("safe",))

    @pytest.mark.usefixtures("dead")
    def test_an_unavailable_one_is_final(self) -> None:
        with pytest.raises(BackendUnavailableError, match="'dead' cannot run here: no GPU is visible"):
            chosen("dead")

    def test_an_unknown_one_is_not_replaced(self) -> None:
        """Only a package of ours is named for installing: a mistyped name might be a stranger's package."""
        for name, told in (("saef", "(did you mean 'safe'?). Installed: fast, safe."), ("tritn", "ringattn-triton")):
            with pytest.raises(BackendNotFoundError) as caught:
                chosen(name)
            assert str(caught.value).endswith(told)

    def test_a_named_backend_is_taken_on_any_platform_that_its_probe_accepts(self) -> None:
        assert chosen("fast", platform="cpu") == "fast"

    @pytest.mark.parametrize("backend", ["", (), (1,), 7, {"safe"}])
    def test_an_empty_name_or_a_wrong_type_is_refused(self, backend: Any) -> None:
        with pytest.raises(InputError, match="Pass the name of a backend, or a sequence of names"):
            chosen(backend)


class TestSizesOfHeads:
    @pytest.fixture(autouse=True)
    def _small_and_any(self, install: Any) -> Iterator[None]:
        """Backend `small` takes heads of up to 64, in multiples of 8, and `any` heads of any size."""
        limits: dict[str, Any] = {"largest_head": 64, "head_multiple": 8}
        small = Backend("small", 1, ("cuda",), ALL, kernel="gone:KERNEL", priority=10, **limits)
        with discovery.registered(small, Kernel()), installed("any", "cuda"):
            yield

    @pytest.mark.parametrize("backend", [None, ("small", "any")])
    def test_a_backend_whose_kernel_cannot_run_them_is_passed_over_with_the_reason(self, backend: Any) -> None:
        assert selection.select(backend, CAUSAL, "cuda", (64, 8)).name == "small"
        for sizes in ((72, 8), (8, 20)):
            assert selection.select(backend, CAUSAL, "cuda", sizes).name == "any"
        reasons = {r.name: reason for r, reason in selection.candidates(CAUSAL, "cuda", (68, 20))}
        told = "heads of size 68 (the largest is 64), heads of size 20 (sizes are multiples of 8)"
        assert reasons == {"small": f"it does not support {told}", "any": None}

    def test_a_named_backend_refuses_a_call_before_it_runs_and_names_the_fallback(self) -> None:
        x = jnp.ones((1, 8, 2, 72))
        with pytest.raises(UnsupportedFeatureError, match=r"heads of size 72 .*64.*backend=\('small', 'any'\)"):
            ring_attention(x, x, x, backend="small")


@pytest.mark.usefixtures("fast_and_safe", "dead")
class TestASequence:
    def test_the_first_backend_that_can_run_the_call_is_taken(self) -> None:
        assert chosen(("safe", "fast")) == "safe"
        assert chosen(["fast", "safe"]) == "fast"
        assert chosen(["fast", "safe"], BIAS) == "safe"
        assert chosen(("dead", "absent", "fast")) == "fast"

    def test_one_that_is_not_installed_is_passed_over_with_a_warning(self, log: Any) -> None:
        assert chosen(("absent", "safe")) == "safe"
        assert [message.split(" passed")[0] for message in warnings(log)] == ["backend 'absent'"]

    def test_where_all_fail_each_has_its_reason(self) -> None:
        with pytest.raises(NoBackendError) as caught:
            chosen(("dead", "absent", "fast"), BIAS)
        facts = {"dead": "no GPU is visible", "absent": "no ring-attention backend", "fast": "does not support BIAS"}
        assert caught.value.reasons.keys() == facts.keys()
        assert all(fact in caught.value.reasons[name] and fact in str(caught.value) for name, fact in facts.items())


@pytest.mark.usefixtures("fast_and_safe")
class TestContextAndEnvironment:
    def test_use_backend_names_it_until_the_block_ends(self) -> None:
        with selection.use_backend("safe"):
            assert chosen(None) == "safe"
            with selection.use_backend(["fast", "safe"]):
                assert chosen(None, BIAS) == "safe"
                assert chosen(None) == "fast"
            assert chosen(None) == "safe"
        assert chosen(None) == "fast"

    def test_use_backend_is_for_one_thread(self) -> None:
        seen = []
        with selection.use_backend("safe"):
            thread = threading.Thread(target=lambda: seen.append(chosen(None)))
            thread.start()
            thread.join()
        assert seen == ["fast"]

    def test_the_environment_is_read_at_the_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for value, name in (("safe", "safe"), (" absent , safe", "safe"), ("", "fast"), (" , ", "fast")):
            monkeypatch.setenv("RINGATTN_BACKEND", value)
            assert chosen(None) == name

    def test_an_argument_wins_over_the_context_and_that_over_the_environment(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RINGATTN_BACKEND", "absent")
        with selection.use_backend("safe"):
            assert chosen(None) == "safe"
            assert chosen("fast") == "fast"

    @pytest.mark.parametrize("name", ["absent", ("saef", "fast")])
    def test_a_context_refuses_a_misspelt_name_at_once(self, name: Any) -> None:
        with pytest.raises(BackendNotFoundError, match="no ring-attention backend"), selection.use_backend(name):
            pytest.fail("the context was entered")


class TestTheBest:
    @pytest.mark.usefixtures("fast_and_safe")
    @pytest.mark.parametrize(
        ("platform", "name"), [("cuda", "fast"), ("gpu", "fast"), ("cpu", "safe"), ("tpu", "safe")]
    )
    def test_it_serves_the_platform_and_has_the_highest_priority(self, platform: str, name: str) -> None:
        assert chosen(None, platform=platform) == name

    @pytest.mark.usefixtures("fast_and_safe", "dead")
    def test_a_backend_that_cannot_run_the_call_is_passed_over_and_logged_once(self, log: Any) -> None:
        for _ in range(2):
            assert chosen(None, BIAS) == "safe"
        said = warnings(log)
        assert len(said) == 2
        assert "'dead' passed over: it cannot run here: no GPU is visible" in said[0]
        assert "'fast' passed over: it does not support BIAS (not declared: soon)" in said[1]

    def test_of_two_with_the_same_priority_ours_is_taken(self, install: Any) -> None:
        def put(name: str, distribution: str) -> None:
            source = f"""
                from ringattn_core.contract.backend import Backend
                BACKEND = Backend("{name}", 1, ("cuda",), (), kernel="{name}_plugin:KERNEL")
                class Kernel: forward = lambda *_: None
                KERNEL = Kernel()
            """
            install(distribution, {name: f"{name}_plugin:BACKEND"}, {f"{name}_plugin": source})

        put("a", "of-a-stranger")
        put("triton", "ringattn-triton")
        put("tpu", "also-of-a-stranger")
        assert chosen(None, frozenset()) == "triton", "only ringattn's own distribution has precedence"


@pytest.mark.usefixtures("fast_and_safe")
class TestEnvironmentVariables:
    def test_an_unknown_one_is_warned_about_once_with_the_nearest(
        self, log: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RINGATTN_BACKENDS", "fast")
        for _ in range(2):
            chosen("safe")
        assert len(warnings(log)) == 1
        assert "RINGATTN_BACKENDS is not known (did you mean 'RINGATTN_BACKEND'?)" in warnings(log)[0]

    def test_a_backend_declares_its_own(self, log: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RINGATTN_MINE", "1")
        mine = Backend("mine", 1, ("tpu",), ALL, kernel="gone:KERNEL", variables=("RINGATTN_MINE",))
        with discovery.registered(mine, Kernel()):
            chosen("safe")
        assert warnings(log) == []
        chosen("safe")
        assert "RINGATTN_MINE is not known" in warnings(log)[0]
