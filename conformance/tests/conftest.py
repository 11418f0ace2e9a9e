# SPDX-License-Identifier: Apache-2.0
"""Lets these tests run a small suite in place of the real one."""

from pathlib import Path

import pytest
from ringattn_testing.conformance.small_suites import SmallSuite


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> SmallSuite:
    """Call it with arguments for pytest."""
    return SmallSuite(tmp_path, monkeypatch, capsys)
