# SPDX-License-Identifier: Apache-2.0
"""Lets these tests import what lies beside them, whatever the import mode, and run a small suite."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from small_suites import SmallSuite


@pytest.fixture
def ran(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> SmallSuite:
    """Call it with arguments for pytest."""
    return SmallSuite(tmp_path, monkeypatch, capsys)
