# SPDX-License-Identifier: Apache-2.0
"""Promises of the errors: each says the fact, the value and the remedy, and has the right base classes."""

import inspect

import pytest
from ringattn_core import errors

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
        errors.BackendNotFoundError("tritn", ("xla",)),
        LookupError,
        "no ring-attention backend 'tritn' (did you mean 'triton'?). Installed: xla. "
        "To add it: in a clone of the repository, run pip install ./packages/ringattn-triton",
    ),
    (
        errors.BackendLoadError("mine", "ringattn-mine", "cannot load mine:K", ModuleNotFoundError("No module 'x'.")),
        ImportError,
        "backend 'mine' of ringattn-mine is broken: cannot load mine:K: ModuleNotFoundError: No module 'x'. "
        "Reinstall or uninstall ringattn-mine, or name another backend.",
    ),
    (
        errors.BackendVersionError("mine", "ringattn-mine", 3, range(1, 3)),
        errors.RingAttnError,
        "backend 'mine' of ringattn-mine speaks backend API 3; this ringattn-core speaks 1, 2. "
        "Upgrade the older side, ringattn-core",
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
]


@pytest.mark.parametrize(("error", "kind", "message"), EXAMPLES, ids=lambda x: type(x).__name__)
def test_it_says_fact_value_and_remedy(error: errors.RingAttnError, kind: type[Exception], message: str) -> None:
    assert str(error) == message
    assert isinstance(error, errors.RingAttnError)
    assert isinstance(error, kind)


def test_every_error_has_an_example_above() -> None:
    classes = {cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.RingAttnError)}
    assert classes - {type(error) for error, _, _ in EXAMPLES} == {errors.RingAttnError}
