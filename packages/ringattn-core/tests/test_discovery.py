# SPDX-License-Identifier: Apache-2.0
"""Promises of discovery: it imports no kernel, and a broken backend has its own error and does not affect others."""

import sys
from typing import Any

import pytest
from ringattn_core.backends import discovery
from ringattn_core.contract.backend import Backend
from ringattn_core.contract.features import Feature
from ringattn_core.errors import (
    BackendLoadError,
    DuplicateBackendError,
)

PLUGIN = """
    from ringattn_core.contract.features import Feature
    from ringattn_core.contract.backend import Backend
    BACKEND = Backend("{name}", {api}, ("cpu",), {{Feature.CAUSAL}}, {where}, probe={probe!r})
"""
KERNEL = """
    class Kernel:
        def forward(self, block, partial): ...
        def backward(self, block, dout, lse, delta, dq): ...
    KERNEL, CLASS, HALF = Kernel(), Kernel, type("Half", (), {"forward": lambda *a: None})()
    class nested:
        kernel = KERNEL
    def ring(query, key, value, **options): ...
    number = 3
    asked = []
    def sound(): asked.append(1)
    def unsound(): asked.append(1); return "no such device"
    def crash(): raise OSError("libfoo.so is missing")
"""


def plugin(name: str, api: object = 1, where: str = "kernel='good_kernel:KERNEL'", probe: str | None = None) -> str:
    return PLUGIN.format(name=name, api=api, where=where, probe=probe)


def good(install: Any, **options: Any) -> discovery.Registration:
    install(
        "ringattn-good",
        {"good": "good_plugin:BACKEND"},
        {"good_plugin": plugin("good", **options), "good_kernel": KERNEL},
    )
    return discovery.registrations()["good"]


class Forward:
    def forward(self, block: Any, partial: Any) -> Any: ...


class Kernel(Forward):
    def backward(self, block: Any, dout: Any, lse: Any, delta: Any, dq: Any) -> Any: ...


def backend(name: str = "made", **options: Any) -> Backend:
    return Backend(
        name,
        **{
            "api": 1,
            "platforms": ("cpu",),
            "features": {Feature.CAUSAL},
            "kernel": "no:where",
            **options,
        },
    )


class TestWhatIsInstalled:
    def test_a_distribution_with_an_entry_point_is_found(self, install: Any) -> None:
        registration = good(install)
        assert (registration.name, registration.distribution, registration.version) == ("good", "ringattn-good", "1.0")
        assert registration.error is None
        assert discovery.get("good") is registration

    def test_looking_imports_no_kernel(self, install: Any) -> None:
        registration = good(install)
        assert "good_plugin" in sys.modules
        assert "good_kernel" not in sys.modules
        registration.implementation()
        assert "good_kernel" in sys.modules


class TestBrokenOnes:
    def test_the_cause_of_a_failed_import_is_kept(self, install: Any) -> None:
        install("ringattn-bad", {"bad": "bad_plugin:B"}, {"bad_plugin": "raise RuntimeError('boom')"})
        with pytest.raises(BackendLoadError) as caught:
            discovery.get("bad")
        assert isinstance(caught.value.__cause__, RuntimeError)

    def test_two_distributions_under_one_name_are_an_error_only_for_that_name(self, install: Any) -> None:
        for owner in ("ringattn-one", "ringattn-two"):
            install(owner, {"twin": "twin_plugin:BACKEND"}, {"twin_plugin": plugin("twin")})
        registration = good(install)
        assert isinstance(discovery.registrations()["twin"].error, DuplicateBackendError)
        with pytest.raises(DuplicateBackendError) as caught:
            discovery.get("twin")
        assert set(caught.value.distributions) == {"ringattn-one", "ringattn-two"}
        assert discovery.get("good") is registration

    @pytest.mark.parametrize(("features", "missing"), [(set(), None), ({Feature.GRADIENTS}, "needs backward")])
    def test_a_kernel_needs_a_backward_pass_if_its_backend_declares_gradients(self, features: Any, missing: str | None):
        kernel = Forward()
        with discovery.registered(backend(features={Feature.CAUSAL, *features}), kernel) as registration:
            if missing is None:
                assert registration.implementation() is kernel
            else:
                with pytest.raises(BackendLoadError, match=missing):
                    registration.implementation()


class TestAvailability:
    @pytest.mark.parametrize(("probe", "reason"), [("sound", None), ("unsound", "no such device")])
    def test_the_probe_is_asked_once_until_cleared(self, install: Any, probe: str, reason: str | None) -> None:
        registration = good(install, probe=f"good_kernel:{probe}")
        assert [registration.why_unavailable() for _ in range(2)] == [reason, reason]
        assert len(sys.modules["good_kernel"].asked) == 1
        discovery.clear()
        assert discovery.registrations()["good"].why_unavailable() == reason
        assert len(sys.modules["good_kernel"].asked) == 2


class TestRegisteredInThisProcess:
    def test_it_shadows_an_installed_one_and_restores_it_even_after_an_error(self, install: Any) -> None:
        installed = good(install)
        with discovery.registered(backend("good"), Kernel()) as outer:
            with pytest.raises(ZeroDivisionError), discovery.registered(backend("good"), Kernel()):
                raise ZeroDivisionError
            assert discovery.get("good") is outer
        assert discovery.get("good") is installed
