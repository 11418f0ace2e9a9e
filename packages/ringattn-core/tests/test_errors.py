# SPDX-License-Identifier: Apache-2.0
"""Promises of the errors: each is the built-in error of its kind too, and a remedy fits what is installed."""

import inspect

from ringattn_core import errors

KINDS: dict[type[errors.RingAttnError], type[Exception]] = {
    errors.InputError: ValueError,
    errors.MeshError: ValueError,
    errors.DerivativeError: NotImplementedError,
    errors.UnsupportedFeatureError: NotImplementedError,
    errors.BackendNotFoundError: LookupError,
    errors.BackendLoadError: ImportError,
    errors.BackendVersionError: errors.RingAttnError,
    errors.DuplicateBackendError: errors.RingAttnError,
    errors.BackendUnavailableError: RuntimeError,
    errors.NoBackendError: RuntimeError,
    errors.TuningError: RuntimeError,
    errors.KernelError: TypeError,
    errors.ToolsNotFoundError: ImportError,
}


def test_each_is_the_built_in_error_of_its_kind_too() -> None:
    classes = {cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, errors.RingAttnError)}
    assert classes == {errors.RingAttnError, *KINDS}
    assert all(issubclass(error, kind) for error, kind in KINDS.items())


def test_a_misspelt_backend_of_ours_comes_with_the_command_that_adds_it() -> None:
    said = str(errors.BackendNotFoundError("tritn", ("xla",)))
    assert "(did you mean 'triton'?). Installed: xla." in said and said.endswith("./packages/ringattn-triton")
    assert "pip install" not in str(errors.BackendNotFoundError("xal", ("xla",)))


def test_who_has_no_backend_for_a_call_is_told_of_the_one_that_runs_every_call() -> None:
    for installed, named in ((("triton",), True), (("triton", "xla"), False)):
        for error in (
            errors.UnsupportedFeatureError("triton", "BIAS", "planned", (), installed),
            errors.NoBackendError("cuda", {"triton": "no GPU is visible."}, installed),
        ):
            assert ("./packages/ringattn-xla" in str(error)) == named


def test_the_older_side_is_the_one_to_upgrade() -> None:
    for api, older in ((3, "ringattn-core"), (0, "ringattn-mine")):
        assert str(errors.BackendVersionError("mine", "ringattn-mine", api, range(1, 3))).endswith(f"side, {older}")
