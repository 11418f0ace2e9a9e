# SPDX-License-Identifier: Apache-2.0
"""Setup of the tests of the adapters: no setting of the shell."""

import pytest


@pytest.fixture(autouse=True)
def _without_settings(without_settings: None) -> None: ...
