# SPDX-License-Identifier: Apache-2.0
"""Setup of the tests of the TPU backend: kernels are interpreted, and slow results are shared."""

import fcntl
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

os.environ["RINGATTN_TPU_INTERPRET"] = "1"


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], Any]], Any]:
    """`once(name, make)` is what `make()` says, as JSON: made by the process that asks first; others wait."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def make_once(name: str, make: Callable[[], Any]) -> Any:
        made = folder / f"{name}.json"
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not made.exists():
                text = json.dumps(make())
                made.write_text(text)
        return json.loads(made.read_text())

    return make_once
