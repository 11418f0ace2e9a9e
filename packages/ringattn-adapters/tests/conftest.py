# SPDX-License-Identifier: Apache-2.0
"""Setup of the tests of the adapters: no setting of the shell."""

import importlib.util

import pytest

# `nox -s hosts` installs the released libraries.
collect_ignore = [] if importlib.util.find_spec("levanter") else ["test_released_hosts.py"]


@pytest.fixture(autouse=True)
def _without_settings(without_settings: None) -> None: ...
