# SPDX-License-Identifier: Apache-2.0
"""Promises of discovery: it imports no kernel, and a broken backend is one sentence that affects no other backend."""

import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from ringattn_core import ring_attention
from ringattn_core.backends import discovery, selection
from ringattn_core.contract.backend import Backend
from ringattn_core.contract.features import Feature
from ringattn_core.errors import BackendLoadError, DuplicateBackendError, RingAttnError

PLUGIN = """
    from ringattn_core.contract.features import Feature
    from ringattn_core.contract.backend import Backend
    class Odd:
        def __repr__(self): raise RuntimeError("no text")
    class Other(Exception):
        def __str__(self): raise RuntimeError("no text")
    FIELDS = dict(
        name="bad", api=1, platforms=("cpu",), features=frozenset(Feature), kernel="bad_kernel:KERNEL",
        priority=50,
    )
"""
KERNEL = """
    def taken(*_): raise AssertionError("a broken kernel was called")
    class Kernel:
        forward = backward = taken
    class Deaf:
        def __getattr__(self, name): raise RuntimeError("no " + name)
        def __repr__(self): raise RuntimeError("no text")
    class Half:
        forward = taken
    class Restless(Kernel):
        def __hash__(self): return 1
        def __eq__(self, other): return False
    KERNEL, DEAF, HALF, RESTLESS, NUMBER = Kernel(), Deaf(), Half(), Restless(), 3
    EQUAL = type("Equal", (Kernel,), {"__eq__": lambda *_: True})()
    def no(): return False
    def crash(): raise OSError("libfoo.so: \\n  cannot open")
    async def later(): return None
"""
FIELDS = {
    "a name that is a number": ("name=3", "name must be a word"),
    "another name": ("name='worse'", "its name is 'worse', and its entry point is named 'bad'"),
    "an API of None": ("api=None", "api must be an integer"),
    "an API of the future": ("api=2, platforms=3", "speaks backend API 2; this ringattn-core speaks 1"),
    "one platform as text": ("platforms='cpu'", "platforms must be a tuple of names"),
    "features in a mapping": ("features={Feature.CAUSAL: True}", "must be a set or a tuple of members of Feature"),
    "a kernel that is an object": ("kernel=Odd()", "RuntimeError: no text"),
    "neither kernel nor ring": ("kernel=None", "exactly one of self.kernel=None and self.ring=None"),
    "a field that is unknown": ("colour=1", "TypeError: Backend.__init__() got an unexpected keyword argument"),
}
"""Fields of a descriptor that replace those of a good one, and what the sentence says."""
SOURCES = {
    "SystemExit at import": ("raise SystemExit('no GPU')", "SystemExit: no GPU"),
    "a syntax error": ("def", "SyntaxError: invalid syntax"),
    "an error without text": ("raise Other", "Other: its message cannot be read"),
    "no descriptor": ("x = 1", "AttributeError: module 'bad_plugin' has no attribute 'BACKEND'"),
    "an object without a repr": ("BACKEND = Odd()", "expected a ringattn_core.Backend, got Odd"),
}
"""Source of the module of a descriptor, and what the sentence says."""
LOADED = {
    "a kernel that is missing": ("kernel='bad_kernel:NOBODY'", "has no attribute 'NOBODY'"),
    "a kernel without backward": ("kernel='bad_kernel:HALF'", "a block kernel needs backward"),
    "a kernel that is not equal to itself": ("kernel='bad_kernel:RESTLESS'", "JAX would compile anew for every call"),
    "a kernel without a hash": ("kernel='bad_kernel:EQUAL'", "unhashable type: 'Equal'"),
    "a kernel whose attributes raise": ("kernel='bad_kernel:DEAF'", "RuntimeError: no forward"),
    "a ring that is a number": ("kernel=None, ring='bad_kernel:NUMBER'", "a ring function must be callable, got 3"),
    "a probe that returns False": ("probe='bad_kernel:no'", "it returned False, and must return None or a sentence"),
    "a probe that raises": ("probe='bad_kernel:crash'", "failed: OSError: libfoo.so: cannot open"),
    "a probe that is a coroutine": ("probe='bad_kernel:later'", "it returned <coroutine object later"),
}
"""Fields of a good descriptor whose kernel or probe is broken, and what the sentence says."""
GOOD = """
    from ringattn_core.contract.backend import Backend
    from ringattn_core.contract.features import Feature
    BACKEND = Backend("good", 1, ("cpu",), frozenset(Feature), ring="good_ring:ring", probe="good_ring:probe")
"""
RING = """
    asked = []
    def probe(): asked.append(1)
    def ring(query, key, value, **options): return 2 * query
"""


def good(install: Any) -> discovery.Registration:
    install("made-good", {"good": "good_plugin:BACKEND"}, {"good_plugin": GOOD, "good_ring": RING})
    return discovery.registrations()["good"]


def test_a_distribution_with_an_entry_point_is_found_and_its_kernel_is_imported_when_it_is_used(install: Any) -> None:
    registration = good(install)
    assert (registration.name, registration.distribution, registration.version) == ("good", "made-good", "1.0")
    assert registration.error is None and discovery.get("good") is registration
    assert "good_plugin" in sys.modules and "good_ring" not in sys.modules
    registration.implementation()
    assert "good_ring" in sys.modules


def test_the_probe_is_asked_once_until_cleared(install: Any) -> None:
    registration = good(install)
    for times in (1, 2):
        assert [registration.why_unavailable() for _ in range(2)] == [None, None]
        assert len(sys.modules["good_ring"].asked) == times
        discovery.clear()
        registration = discovery.registrations()["good"]


def test_two_distributions_under_one_name_are_an_error_only_for_that_name(install: Any) -> None:
    for owner in ("made-one", "made-two"):
        install(owner, {"twin": "twin_plugin:BACKEND"}, {"twin_plugin": GOOD.replace("good", "twin")})
    registration = good(install)
    assert isinstance(discovery.registrations()["twin"].error, DuplicateBackendError)
    with pytest.raises(DuplicateBackendError, match="pip uninstall made-") as caught:
        discovery.get("twin")
    assert set(caught.value.distributions) == {"made-one", "made-two"}
    assert discovery.get("good") is registration


def made(name: str, *features: Feature) -> Backend:
    return Backend(name, 1, ("cpu",), features, kernel="no:where")


def test_a_kernel_of_a_backend_without_gradients_needs_no_backward_pass() -> None:
    kernel = type("Forward", (), {"forward": lambda *_: None})()
    with discovery.registered(made("made", Feature.CAUSAL), kernel) as registration:
        assert registration.implementation() is kernel


def test_a_backend_of_this_process_shadows_an_installed_one_until_the_block_ends(install: Any) -> None:
    installed = good(install)
    with discovery.registered(made("good"), object()) as outer:
        with pytest.raises(ZeroDivisionError), discovery.registered(made("good"), object()):
            raise ZeroDivisionError
        assert discovery.get("good") is outer
    assert discovery.get("good") is installed


def with_fields(fields: str) -> str:
    return f"{PLUGIN}    BACKEND = Backend(**(FIELDS | dict({fields})))\n"


DESCRIPTORS = {name: (with_fields(fields), said) for name, (fields, said) in FIELDS.items()}
DESCRIPTORS |= {name: (f"{PLUGIN}    {source}\n", said) for name, (source, said) in SOURCES.items()}
KERNELS = {name: (with_fields(fields), said) for name, (fields, said) in LOADED.items()}


@pytest.mark.parametrize("name", [*DESCRIPTORS, *KERNELS])
@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_broken_backend_is_one_sentence_and_every_other_call_goes_on(name: str, install: Any) -> None:
    source, sentence = (DESCRIPTORS | KERNELS)[name]
    good(install)
    install("made-bad", {"bad": "bad_plugin:BACKEND"}, {"bad_plugin": source, "bad_kernel": KERNEL})
    x = jnp.ones((1, 4, 2, 8))
    for options in ({}, {"backend": "good"}, {"backend": ("bad", "good")}):
        assert (ring_attention(x, x, x, **options) == 2 * x).all()
    with pytest.raises(RingAttnError) as caught:
        ring_attention(x, x, x, backend="bad")
    assert (caught.value.__cause__ is not None) == isinstance(caught.value, BackendLoadError)
    said = str(caught.value)
    assert said.startswith("backend 'bad' of made-bad ") and sentence in said and "\n" not in said
    assert (discovery.registrations()["bad"].error is not None) == (name in DESCRIPTORS)
    reasons = {registration.name: reason for registration, reason in selection.candidates(frozenset(), "cpu")}
    assert reasons == {"bad": said, "good": None}


def test_a_distribution_without_metadata_hides_no_backend(install: Any, tmp_path: Path) -> None:
    """What a partly removed installation leaves."""
    good(install)
    install("made-bad", {"bad": "bad_plugin:BACKEND"}, {})
    (metadata,) = (tmp_path / "made-bad").glob("*/METADATA")
    metadata.unlink()
    discovery.clear()
    found = discovery.registrations()
    assert found["good"].error is None
    assert str(found["bad"].error).startswith("backend 'bad' of an unknown distribution is broken")
    metadata.write_text("Name: made-bad\n")
    discovery.clear()
    assert str(discovery.registrations()["bad"].error).startswith("backend 'bad' of made-bad is broken")


def test_metadata_that_cannot_be_read_hides_no_backend(install: Any, log: Any, tmp_path: Path) -> None:
    good(install)
    install("made-bad", {}, {})
    (entry_points,) = (tmp_path / "made-bad").glob("*/entry_points.txt")
    entry_points.write_bytes(b"[ringattn.backends]\n\xff\xfe = nonsense\n")
    discovery.clear()
    assert list(discovery.registrations()) == ["good"]
    (record,) = log.records
    assert record.getMessage().startswith("the entry points of made-bad cannot be read: UnicodeDecodeError")


def test_an_interrupt_is_no_broken_backend(install: Any) -> None:
    install("made-bad", {"bad": "bad_plugin:BACKEND"}, {"bad_plugin": "raise KeyboardInterrupt"})
    with pytest.raises(KeyboardInterrupt):
        discovery.registrations()
