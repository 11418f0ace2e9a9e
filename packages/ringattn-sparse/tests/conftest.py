# SPDX-License-Identifier: Apache-2.0
"""Setup of the tests of choosing keys: shapes are checked at run time, and no setting of the shell counts."""

import jaxtyping
import pytest

jaxtyping.install_import_hook(["ringattn_sparse.scores", "ringattn_sparse.tiles"], "beartype.beartype")


@pytest.fixture(autouse=True)
def _without_settings(without_settings: None) -> None: ...
