# SPDX-License-Identifier: Apache-2.0
"""Promises of the errors: each says the fact, the value and the remedy, and has the right base classes."""

import inspect
from typing import Any

import pytest
from ringattn_core import errors
from ringattn_core.contract.backend import API_VERSIONS, Backend
from ringattn_core.contract.features import Feature

EXAMPLES: list[tuple[errors.RingAttnError, type[Exception], str]] = [
    (
        errors.InputError("chunk_size", "got 0", "Pass a positive integer"),
        ValueError,
        "chunk_size: got 0. Pass a positive integer",
    ),
    (errors.MeshError("axis 'sp' is not in the mesh"), ValueError, "axis 'sp' is not in the mesh"),
    (
        errors.UnsupportedFeatureError("triton", "BIAS", "planned", ("xla",), ("triton", "xla")),
        NotImplementedError,
        "backend 'triton' does not support BIAS (planned). Installed backends that do: xla. "
        "Pass backend=('triton', 'xla') to allow the fallback.",
    ),
    (
        errors.UnsupportedFeatureError("triton", "BIAS", "impossible", (), ("triton",)),
        NotImplementedError,
        "backend 'triton' does not support BIAS (impossible). No installed backend does. "
        "Call without it, or add the backend that supports everything: "
        "in a clone of the repository, run pip install ./packages/ringattn-xla",
    ),
    (
        errors.UnsupportedFeatureError("triton", "BIAS", "not declared", (), ("triton", "xla")),
        NotImplementedError,
        "backend 'triton' does not support BIAS (not declared). No installed backend does. Call without it",
    ),
    (
        errors.BackendNotFoundError(None, ()),
        LookupError,
        "no ring-attention backend is installed. To add one: "
        "in a clone of the repository, run pip install ./packages/ringattn-xla",
    ),
    (
        errors.BackendNotFoundError("tritn", ("xla",)),
        LookupError,
        "no ring-attention backend 'tritn' (did you mean 'triton'?). Installed: xla. "
        "To add it: in a clone of the repository, run pip install ./packages/ringattn-triton",
    ),
    (
        errors.BackendNotFoundError("triton", ()),
        LookupError,
        "no ring-attention backend 'triton'. Installed: none. "
        "To add it: in a clone of the repository, run pip install ./packages/ringattn-triton",
    ),
    (
        errors.BackendNotFoundError("xal", ("xla", "mine")),
        LookupError,
        "no ring-attention backend 'xal' (did you mean 'xla'?). Installed: xla, mine.",
    ),
    (
        errors.BackendNotFoundError("cudnn", ("mine",)),
        LookupError,
        "no ring-attention backend 'cudnn'. Installed: mine. "
        "To add all of ringattn's own: in a clone of the repository, "
        "run pip install ./packages/ringattn-xla ./packages/ringattn-triton ./packages/ringattn-tpu",
    ),
    (
        errors.BackendLoadError("mine", "ringattn-mine", "cannot load mine:K", ModuleNotFoundError("No module 'x'.")),
        ImportError,
        "backend 'mine' of ringattn-mine is broken: cannot load mine:K: ModuleNotFoundError: No module 'x'. "
        "Reinstall or uninstall ringattn-mine, or name another backend.",
    ),
    (
        errors.BackendLoadError("mine", None, "its descriptor", "its name is 'other'"),
        ImportError,
        "backend 'mine' is broken: its descriptor: its name is 'other'. Correct it, or name another backend.",
    ),
    (
        errors.BackendVersionError("mine", "ringattn-mine", 3, range(1, 3)),
        errors.RingAttnError,
        "backend 'mine' of ringattn-mine speaks backend API 3; this ringattn-core speaks 1, 2. "
        "Upgrade the older side, ringattn-core",
    ),
    (
        errors.BackendVersionError("mine", "ringattn-mine", 0, range(1, 2)),
        errors.RingAttnError,
        "backend 'mine' of ringattn-mine speaks backend API 0; this ringattn-core speaks 1. "
        "Upgrade the older side, ringattn-mine",
    ),
    (
        errors.DuplicateBackendError("mine", ("ringattn-mine", "my-ring")),
        errors.RingAttnError,
        "backend 'mine' is registered by 2 distributions: ringattn-mine, my-ring. "
        "Uninstall all but one: pip uninstall my-ring",
    ),
    (
        errors.BackendUnavailableError("triton", "no GPU is visible"),
        RuntimeError,
        "backend 'triton' cannot run here: no GPU is visible. Leave backend unset, or name another one.",
    ),
    (
        errors.NoBackendError("cuda", {"triton": "no GPU is visible", "mine": "it serves tpu, not cuda"}, ("triton",)),
        RuntimeError,
        "no ring-attention backend can run this call on 'cuda':\n"
        "  triton: no GPU is visible.\n"
        "  mine: it serves tpu, not cuda.\n"
        "Call without what they lack, or add the backend that supports everything: "
        "in a clone of the repository, run pip install ./packages/ringattn-xla",
    ),
    (
        errors.NoBackendError("cuda", {"triton": "no GPU is visible."}, ("triton", "xla")),
        RuntimeError,
        "no ring-attention backend can run this call on 'cuda':\n  triton: no GPU is visible.\n"
        "Call without what they lack",
    ),
    (
        errors.TuningError("mine", "it has no candidate_configs", "Pass its parameters with cfg="),
        RuntimeError,
        "backend 'mine' cannot be tuned: it has no candidate_configs. Pass its parameters with cfg=",
    ),
    (
        errors.KernelError("a kernel", "backward", "returned dbias = None", "Return float32[1, 2]"),
        TypeError,
        "str.backward returned dbias = None. Return float32[1, 2]",
    ),
    (
        errors.ToolsNotFoundError("RINGATTN_AUTOTUNE=on"),
        ImportError,
        "RINGATTN_AUTOTUNE=on needs ringattn-tools, which is not installed. To add it: "
        "in a clone of the repository, run pip install ./packages/ringattn-tools",
    ),
    (errors.DerivativeError("it was differentiated twice"), NotImplementedError, "it was differentiated twice"),
    (
        errors.BackendNotFoundError("cudnn", ("xla", "tpu")),
        LookupError,
        "no ring-attention backend 'cudnn'. Installed: xla, tpu. "
        "To add all of ringattn's own: in a clone of the repository, run pip install ./packages/ringattn-triton",
    ),
    (
        errors.BackendNotFoundError("cudnn", ("tpu", "triton", "xla")),
        LookupError,
        "no ring-attention backend 'cudnn'. Installed: tpu, triton, xla.",
    ),
]


@pytest.mark.parametrize(("error", "kind", "message"), EXAMPLES, ids=lambda x: type(x).__name__)
def test_it_says_fact_value_and_remedy(error: errors.RingAttnError, kind: type[Exception], message: str) -> None:
    assert str(error) == message
    assert isinstance(error, errors.RingAttnError)
    assert isinstance(error, kind)


def test_every_error_has_an_example_above() -> None:
    classes = {cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.RingAttnError)}
    assert classes - {type(error) for error, _, _ in EXAMPLES} == {errors.RingAttnError}


@pytest.mark.parametrize(
    ("error", "held"),
    [
        (EXAMPLES[0][0], {"argument": "chunk_size"}),
        (EXAMPLES[2][0], {"backend": "triton", "feature": "BIAS", "others": ("xla",)}),
        (EXAMPLES[6][0], {"name": "tritn", "installed": ("xla",)}),
        (EXAMPLES[12][0], {"backend": "mine", "api": 3}),
        (EXAMPLES[14][0], {"backend": "mine", "distributions": ("ringattn-mine", "my-ring")}),
        (EXAMPLES[15][0], {"backend": "triton", "reason": "no GPU is visible"}),
        (EXAMPLES[17][0], {"platform": "cuda", "reasons": {"triton": "no GPU is visible."}}),
    ],
    ids=lambda x: type(x).__name__,
)
def test_it_holds_the_offender(error: errors.RingAttnError, held: dict[str, Any]) -> None:
    assert {name: getattr(error, name) for name in held} == held


class Unreadable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError("libfoo.so:\n  not found"), "OSError: libfoo.so: not found"),
        (SystemExit(), "SystemExit"),
        (Unreadable(), "Unreadable: its message cannot be read"),
        (ValueError("many words " * 100), f"ValueError: {'many words ' * 35}..."),
    ],
)
def test_any_exception_is_told_in_one_line(error: BaseException, line: str) -> None:
    assert errors.in_one_line(error) == line


class TestTheDescriptor:
    @pytest.mark.parametrize("where", [{}, {"kernel": "a:b", "ring": "a:c"}])
    def test_it_names_exactly_one_implementation(self, where: dict[str, str]) -> None:
        with pytest.raises(ValueError, match=r"Backend 'mine': exactly one of self\.kernel=.* and self\.ring="):
            Backend("mine", 1, ("cpu",), (), **where)  # pyright: ignore[reportArgumentType]

    def test_only_what_is_declared_is_supported(self) -> None:
        backend = Backend("mine", 1, ("cpu",), (Feature.BIAS,), kernel="a:b")
        assert backend.supports(Feature.BIAS) and not backend.supports(Feature.CAUSAL)

    def test_the_first_version_of_the_api_is_spoken(self) -> None:
        assert 1 in API_VERSIONS


def test_every_feature_is_a_sentence_of_its_own() -> None:
    assert all(feature.value.endswith(".") for feature in Feature)
    assert len({feature.value for feature in Feature}) == len(Feature) == len(Feature.__members__)
