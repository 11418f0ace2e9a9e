# SPDX-License-Identifier: Apache-2.0
"""Setup of the tests of core: annotated shapes and dtypes are checked at run time, in the modules that compute."""

import hypothesis
import jaxtyping
import pytest

COMPUTING = (
    *(f"contract.{name}" for name in ("dropout", "merge", "ordering", "packing", "tiles", "visibility")),
    "placement.layout",
    *(f"ring.{name}" for name in ("backward", "engine", "exchange", "forward")),
)
jaxtyping.install_import_hook([f"ringattn_core.{name}" for name in COMPUTING], "beartype.beartype")
hypothesis.settings.register_profile("promises", derandomize=True, deadline=None, database=None, max_examples=60)
hypothesis.settings.load_profile("promises")


@pytest.fixture(autouse=True)
def _without_settings(without_settings: None) -> None: ...
